"""The papers' policies, and the baselines that the papers compare them with."""
