"""Corpus, tokenizer, packed dataset, and the samples of a microbatch."""

from megatron_ft.data.corpus import Corpus, default_corpus, read_documents
from megatron_ft.data.dataset import DatasetMeta, PackedDataset, prepare, read_meta
from megatron_ft.data.indexed import Blend, IndexedTokens, open_corpora
from megatron_ft.data.order import Permutation, sample_indices
from megatron_ft.data.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "Blend",
    "Corpus",
    "DatasetMeta",
    "IndexedTokens",
    "PackedDataset",
    "Permutation",
    "Tokenizer",
    "default_corpus",
    "open_corpora",
    "prepare",
    "read_documents",
    "read_meta",
    "sample_indices",
    "train_tokenizer",
]
