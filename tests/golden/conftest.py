"""The option that accepts what the cases print now."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the output of all cases in tests/golden anew")
