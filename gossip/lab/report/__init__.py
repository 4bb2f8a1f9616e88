"""The report of a sweep for readers and for other programs: an HTML page, a CSV table and a JSON document.

The page is self-contained: styles, scripts and charts are embedded, and nothing is loaded.
"""

from gossip.lab.report.report_document import Curves as Curves
from gossip.lab.report.report_document import Document as Document
from gossip.lab.report.report_document import Metric as Metric
from gossip.lab.report.report_document import Row as Row
from gossip.lab.report.report_document import Value as Value
from gossip.lab.report.report_files import write_report as write_report

__all__ = ["Curves", "Document", "Metric", "Row", "Value", "write_report"]
