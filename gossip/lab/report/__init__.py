"""What a sweep leaves for people and for other programs: one HTML page, one table as CSV, and the document as JSON.

The page loads nothing from anywhere: style, script and charts stand in it. It needs no package beyond the standard
library.
"""

from gossip.lab.report.report_document import Curves as Curves
from gossip.lab.report.report_document import Document as Document
from gossip.lab.report.report_document import Metric as Metric
from gossip.lab.report.report_document import Row as Row
from gossip.lab.report.report_document import Value as Value
from gossip.lab.report.report_document import read_document as read_document
from gossip.lab.report.report_files import write_report as write_report

__all__ = ["Curves", "Document", "Metric", "Row", "Value", "read_document", "write_report"]
