"""Fault injection into real processes: where a rank stops (``points``), and who kills it there (``inject``)."""
