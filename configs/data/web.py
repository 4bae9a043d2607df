"""A crawl to training text, by FineWeb's rules and order (Penedo et al. 2024), then masks.

Command   lmjax prepare --config configs/data/web.py --documents 'crawl/*.warc.gz' --source web --out prepared/web
          (add --dry-run for a sample first; --config.decontaminate.benchmarks.NAME=FILE for each benchmark that will be run)
Hardware  one process; 2 CPU cores with other work on them
Time      3,000 HTML pages of manuals in 27 languages (92 MB): 38 s
Reached   420 pages, 3.2 MB: most are not English, or are lists of functions that Gopher's rules call no prose
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """English; for others see multilingual.py."""
    return ConfigDict(
        {
            "stages": (
                "url",
                "clean",
                "language",
                "gopher_repetition",
                "gopher_quality",
                "c4",
                "fineweb",
                "exact_dedup",
                "near_dedup",
                "decontaminate",
                "safety",
                "pii",
            ),
            "language": {"languages": {"en": 0.65}},
            "c4": {"terminal_punctuation": False, "javascript": True},  # FineWeb: the rule of line ends costs too much
            "safety": {"action": "tag"},
            "save": "pass",
        }
    )
