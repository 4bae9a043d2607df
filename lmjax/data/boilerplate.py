"""Lines of a web page that are no part of its text: a conservative list of rules for whole, short lines, and runs of menu entries.

A line is judged alone and goes only if all of it is boilerplate; a long line never goes.
"""

import re

from lmjax.data.stage import Tally

LINE_CHARACTERS = 160  # of a line that may go
SHORT_CHARACTERS = 60  # of one that holds none of LONG_WORDS
MENU_CHARACTERS = 28  # of an entry of a menu
MENU_WORDS = 4

END = r"[ .!:…»›>→↑▲▼+*]*"  # what may stand behind any of these
RULES = {
    "skip": r"skip (to|over|past|navigation)\b.{0,40}|jump to (navigation|search|(main )?content)(, .{0,30})?"
    r"|zum inhalt springen|aller au contenu.{0,20}|(saltar|ir) al contenido.{0,20}|vai al contenuto.{0,20}",
    "cookies": r"(we|(this|our|the) (web)?site) uses? cookies\b.*"
    r"|(accept|reject|allow|manage|decline)( all)?( the)? cookies|cookies?[ -](policy|settings|preferences|notice|consent)"
    r"|(diese (web)?seite|wir) (verwende[nt]|nutzt|nutzen) cookies\b.*|ce site utilise des cookies\b.*"
    r"|(este sitio( web)?|esta web) (utiliza|usa) cookies\b.*|got it|i accept|accept and close",
    "share": r"(share|tweet|pin it)( (this|it))?( (page|article|post|story|entry))?( (on|via|to|by|with) .{1,30})?"
    r"|(e-?mail|print|like) this( (page|article|post|story|entry))?|follow us( on .{1,40})?"
    r"|(facebook|twitter|linkedin|pinterest|whatsapp|reddit|instagram|youtube)",
    "copyright": r"(copyright )?(©|\(c\)|copyright)( copyright)? ?(\d{4}).{0,100}"
    r"|(all rights reserved|alle rechte vorbehalten|tous droits réservés|todos los derechos reservados)",
    "login": r"(log|sign)[ -]?(in|out|up|on)( (or|/) (register|(log|sign)[ -]?(in|up)))?( to .{1,40})?|register( now)?"
    r"|create (an )?(new )?account|(forgot|lost)( your)? password\??|my account|remember me|anmelden|connexion|iniciar sesión",
    "comments": r"leave a (comment|reply)( .{1,40})?|(no|one|\d{1,6}) (comments?|replies|responses)( yet)?"
    r"|(post|add|write) a comment|(view|show|load|see)( all| more)?( \d+)? comments?|reply( to this)?"
    r"|comments are closed|cancel reply",
    "pages": r"[«‹←]{0,2} ?(previous|prev|next|older|newer|first|last)( (page|posts?|articles?|entry|entries|chapter|topic))?"
    r"|[«‹←]{1,2} ?.{0,20}|page \d+( of \d+)?",
    "newsletter": r"subscribe( now| today| here)?( to (our|my|this|the) .{1,60}| (via|by) .{1,40})?"
    r"|sign up (for|to) .{0,60}newsletter.{0,40}"
    r"|(our |the )?newsletter|enter your e-?mail( address)?.{0,40}|unsubscribe",
    "script": r"your browser does not support .{0,60}|loading",
    "more": r"(read|show|see|view|load|learn) (more|all|less)( about .{1,40})?|continue reading( .{1,80})?"
    r"|click here( (to|for) .{1,60})?|mehr (erfahren|lesen)|weiterlesen|lire la suite|leer más|more( info(rmation)?)?",
    "top": r"((back|return|go|jump)( up)? )?to (the )?top( of (the |this )?page)?|nach oben|haut de( la)? page|volver arriba",
    "menu": r"(main |primary |site |mobile )?(menu|navigation)|(toggle|open|close|show|hide)( the)? (menu|navigation|sidebar|search)"
    r"|home ?page|search( (this|the) (site|blog|website)| for)?|quick links|related (posts|articles|stories|links)"
    r"|you may also like",
    "path": r"(you are here: ?.{1,120}|(home|start|startseite|accueil|inicio)(( ?[»›>|·•] ?| / )[^»›>/|·•]{1,40}){1,8})",
    "legal": r"privacy (policy|statement|notice)|terms( (of|and|&) (use|service|conditions))|site ?map|contact us|about us"
    r"|rss( feed)?|advertise( with us| here)?|impressum|datenschutz(erklärung)?|mentions légales|aviso legal"
    r"|powered by .{1,40}|advertisement|sponsored( content)?",
}
INSIDE = {  # sought where one of LONG_WORDS stands
    "cookies": r".{0,80}\b(use|using) this (web)?site.{0,40}cookies\b.*",
    "copyright": r".{0,60}all rights reserved",
    "script": r".{0,80}\b(enable|activate|turn on) javascript\b.*|.{0,80}\bjavascript (is|must be|to be|needs to be|seems to be)"
    r" (disabled|enabled|required|turned (on|off))\b.*",
}


def compiled(rules: dict[str, str]) -> re.Pattern[str]:
    """One pattern; the name of the group that matches is the rule."""
    return re.compile("|".join(rf"(?P<{name}>(?:{rule}){END})" for name, rule in rules.items()))


RULE, RULE_INSIDE = compiled(RULES), compiled(INSIDE)
LONG_WORDS = (
    "cookie",
    "javascript",
    "rights",
    "droits",
    "rechte",
    "derechos",
    "copyright",
    "©",
    "you are here",
    "sign up",
    "enter your",
)
SENTENCE_END = frozenset(".!?;:,。！？…\"')]}”")
MENU_ENTRY = re.compile(r"(?:[•·*»›>|+-] ?)?[^\W\d_][\w'’&/+ -]*")


def remove_boilerplate(text: str, menu_lines: int, tally: Tally) -> str:
    """The text without such lines.

    Args:
      menu_lines: that many entries of a menu in a row, or more, are one; 0 for never.
    """
    lines = text.split("\n")
    lower = text.lower()
    present = tuple(word for word in LONG_WORDS if word in lower)
    rules = [rule_of(line, present) for line in lines]
    if menu_lines:
        mark_menus(lines, rules, menu_lines)
    for rule in filter(None, rules):
        tally.add("boilerplate_lines", rule)
    return "\n".join(line for line, rule in zip(lines, rules) if rule is None) if any(rules) else text


def rule_of(line: str, present: tuple[str, ...] = LONG_WORDS) -> str | None:
    """The rule by which a line is boilerplate; `present`: the LONG_WORDS that may stand in it."""
    line = line.strip(" \t•*|·-–—»›").lower() if len(line) <= LINE_CHARACTERS else ""
    if not line:
        return None
    match, worded = None, any(word in line for word in present)
    if worded or len(line) <= SHORT_CHARACTERS:
        match = RULE.fullmatch(line) or (RULE_INSIDE.fullmatch(line) if worded else None)
    return match.lastgroup if match else None


def mark_menus(lines: list[str], rules: list[str | None], least: int) -> None:
    """Runs of lines that look like entries of a menu; other boilerplate does not end one, a blank line does."""
    run: list[int] = []
    for i, line in enumerate([*lines, ""]):
        if i < len(lines) and (rules[i] is not None or (line and is_entry(line))):
            run += [i] if rules[i] is None else []
            continue
        if len(run) >= least:
            for entry in run:
                rules[entry] = "menu_entry"
        run = []


def is_entry(line: str) -> bool:
    """A few words that begin like a title and end like none of prose, at the margin: not code, not verse."""
    return (
        len(line) <= MENU_CHARACTERS
        and not line[0].isspace()
        and line.rstrip()[-1] not in SENTENCE_END
        and len(line.split()) <= MENU_WORDS
        and not next((c for c in line if c.isalpha()), "a").islower()
        and MENU_ENTRY.fullmatch(line) is not None
    )
