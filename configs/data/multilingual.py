"""A crawl in many languages: each by its own stop words, dealt to a run by temperature (Conneau et al. 2020).

Command   lmjax prepare --config configs/data/multilingual.py --documents 'crawl/*.warc.gz' --source web --out prepared/multi
Hardware  one process; 2 CPU cores with other work on them
Time      1,651 HTML pages of one handbook in 27 languages: 14 s
Reached   215 pages in seven languages, a source each; untranslated pages, the same in every language, went as near copies
"""

from ml_collections import ConfigDict

STOP_WORDS = {
    "en": ("the", "be", "to", "of", "and", "that", "have", "with"),
    "de": ("der", "die", "das", "und", "ist", "nicht", "mit", "von", "zu", "ein"),
    "fr": ("le", "la", "les", "et", "est", "de", "des", "que", "pas", "un", "une"),
    "es": ("el", "la", "los", "y", "es", "de", "que", "no", "un", "una", "en"),
    "ru": ("и", "в", "не", "на", "что", "с", "по", "это", "как", "для"),
    "ja": (),  # written without spaces: the rule has no meaning
    "zh": (),
}


def get_config() -> ConfigDict:
    """Thresholds are lower than for English alone: the model is less sure of smaller languages."""
    return ConfigDict(
        {
            "stages": ("url", "clean", "language", "gopher_repetition", "gopher_quality", "near_dedup", "pii"),
            "language": {"languages": dict.fromkeys(STOP_WORDS, 0.5)},
            "gopher_quality": {"language_stop_words": STOP_WORDS, "min_word_length": None},
            "deal_by": "language",
            "data": {"temperature": 3.3},  # shares as tokens^0.3
            "save": "pass",
        }
    )
