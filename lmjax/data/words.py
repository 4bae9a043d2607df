r"""Words, as all stages count them: runs of letters and digits, and signs one by one.

The rules of the field depend on the splitter: their ratios count signs among the words. Scripts that write without spaces
(Han, kana, Thai, Lao, Khmer, Burmese) give one word a character, or a Chinese page would be a handful of enormous words.
"""

import re

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])\w)+(?:['’](?:(?![{UNSPACED}])\w)+)*|[^\w\s]")
ASCII_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]", re.ASCII)


def split_words(text: str) -> list[str]:
    """Words and signs in order; white space is left out. "Don't stop, 3.5!" → Don't stop , 3 . 5 !"""
    return (ASCII_WORD if text.isascii() else WORD).findall(text)
