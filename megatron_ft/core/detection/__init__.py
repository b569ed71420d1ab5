"""The fault detector: ranks, links, stragglers, groups whose state differs, stalls."""
