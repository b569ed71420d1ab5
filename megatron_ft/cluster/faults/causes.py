"""Shares of the causes of failures in large training jobs, for injected and simulated runs. No imports."""

MIX: tuple[tuple[str, float], ...] = (
    ("crash", 0.55),
    ("node", 0.15),
    ("hang", 0.12),
    ("flap", 0.10),
    ("straggler", 0.03),
    ("corruption", 0.02),
    ("maintenance", 0.03),
)
"""Rounded, from Llama 3 (arXiv 2407.21783, Table 5), ByteDance (arXiv 2509.16293) and Unicron (arXiv 2401.00134)."""
