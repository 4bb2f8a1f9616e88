"""Pages of reports, and a browser that looks at them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from report_documents import write


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The module's DOCUMENTS as pages."""
    documents: dict[str, dict[str, Any]] = request.module.DOCUMENTS
    folder = tmp_path_factory.mktemp("reports")
    for name, whole in documents.items():
        write(whole, folder / name)
    return {name: folder / name / "report.html" for name in documents}
