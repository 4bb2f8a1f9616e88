"""The report of a sweep for readers and for other programs: an HTML page, a CSV table and a JSON document.

The page is self-contained: styles, scripts and charts are embedded, and nothing is loaded.
"""
