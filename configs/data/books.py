"""Books and other long texts: whole works, paragraphs once, the better copy of each.

Command   lmjax prepare --config configs/data/books.py --documents books --source books --out prepared/books
Hardware  one process; 2 CPU cores with other work on them
Time      3,619 texts, long ones and chapters in 27 languages (56 MB): 27 s
Reached   137 English texts of 1,000 words and more, 10 MB; 1,393 paragraphs that repeat over them are gone
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Long documents pass; what repeats over many books (licences, front matter) is taken out by paragraph."""
    return ConfigDict(
        {
            "stages": ("clean", "language", "gopher_quality", "exact_dedup", "near_dedup", "decontaminate", "pii"),
            "gopher_quality": {"min_words": 1000, "max_words": 10_000_000},
            "exact_dedup": {"level": "paragraph"},
            "near_dedup": {"keep": "longest"},
        }
    )
