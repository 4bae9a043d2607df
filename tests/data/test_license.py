"""License: tags, links, notices, metadata and defaults, in this order; expressions are satisfied as SPDX means them."""

import time

import pytest

from lmjax.data.document import Document
from lmjax.data.license import ALIASES, PHRASES, License, is_allowed, parse, read_notice, to_spdx
from lmjax.data.stage import Counts, run
from lmjax.errors import UserError

MIT = """/* Copyright (c) 2020 A. Uthor
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy
 * of this software and associated documentation files (the "Software"), to deal
 * in the Software without restriction, including without limitation the rights …
 *
 * The above copyright notice and this permission notice shall be included in
 * all copies or substantial portions of the Software.
 */
int main() { return 0; }
"""
BSD = """# Redistribution and use in source and binary forms, with or without
# modification, are permitted provided that the following conditions are met:
# * Redistributions of source code must retain the above copyright notice.
"""
THIRD = "# Neither the name of the copyright holder may be used to endorse or promote products derived.\n"
GPL = """// This program is free software; you can redistribute it and/or modify
// it under the terms of the GNU {}General Public License as published by
// the Free Software Foundation; {}
"""
LATER = "either version {} of the License, or\n// (at your option) any later version."


@pytest.mark.parametrize(
    "text, spdx",
    [
        (MIT, "MIT"),
        (MIT + "Except as contained in this notice, the name of the X Consortium …", "X11"),
        (BSD, "BSD-2-Clause"),
        (BSD + THIRD, "BSD-3-Clause"),
        (BSD + "All advertising materials mentioning features\n" + THIRD, "BSD-4-Clause"),
        ("// Use of this source code is governed by a BSD-style\n// license that can be found in LICENSE.", "BSD-3-Clause"),
        ('# Licensed under the Apache License, Version 2.0 (the "License");', "Apache-2.0"),
        ("<!-- http://www.apache.org/licenses/LICENSE-2.0 -->", "Apache-2.0"),
        (GPL.format("", LATER.format("2")), "GPL-2.0-or-later"),
        (GPL.format("", LATER.format("3")), "GPL-3.0-or-later"),
        (GPL.format("", "version 2 of the License."), "GPL-2.0-only"),
        (GPL.format("Lesser ", LATER.format("2.1")), "LGPL-2.1-or-later"),
        (GPL.format("Library ", LATER.format("2")), "LGPL-2.0-or-later"),
        (GPL.format("Affero ", LATER.format("3")), "AGPL-3.0-or-later"),
        ("/* Licensed under the GPL-2 or later. */", "GPL-2.0-or-later"),
        ("# under the terms of version 2 of the GNU General Public License", "GPL-2.0-only"),
        ("# Released under the GNU General Public License.", "GPL-1.0-or-later"),
        ("This Source Code Form is subject to the terms of the Mozilla Public\n * License, v. 2.0.", "MPL-2.0"),
        ("# Licensed to PSF under a Contributor Agreement.", "PSF-2.0"),
        ("Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby"
         " granted, provided that the above copyright notice …", "ISC"),
        ("This is free and unencumbered software released into the public domain.", "Unlicense"),
        ("licensed: https://creativecommons.org/licenses/by-nc-sa/3.0/de/", "CC-BY-NC-SA-3.0"),
        ("licence: http://creativecommons.org/publicdomain/zero/1.0/", "CC0-1.0"),
        ("Apache License\n   Version 2.0, January 2004\n   http://www.apache.org/licenses/", "Apache-2.0"),
        ("GNU GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007\n … under the GNU Lesser General Public License", "GPL-3.0-only"),
        (MIT + '# Licensed under the Apache License, Version 2.0', "Apache-2.0 AND MIT"),
        ("The GPL is a licence. GPL-compatible ones are listed by the FSF under GPL terms.", None),
        ("We got permission to license the song.", None),
        ("", None),
    ],
)  # fmt: skip
def test_notices(text, spdx):
    assert read_notice(text) == spdx


@pytest.mark.parametrize(
    "text, spdx",
    [
        ("mit", "MIT"), ("The MIT License (MIT)", "MIT"), ("License :: OSI Approved :: MIT License", "MIT"),
        ("Apache License, Version 2.0", "Apache-2.0"), ("apache-2.0", "Apache-2.0"), ("Apache 2", "Apache-2.0"),
        ("License :: OSI Approved :: Apache Software License", "Apache-2.0"), ("BSD", "BSD-3-Clause"),
        ("3-Clause BSD License", "BSD-3-Clause"), ("GPL-2.0", "GPL-2.0-only"), ("GPL-2.0+", "GPL-2.0-or-later"),
        ("GPLv3+", "GPL-3.0-or-later"), ("GNU GPL v2", "GPL-2.0-only"), ("LGPLv2.1", "LGPL-2.1-only"),
        ("License :: OSI Approved :: GNU General Public License v3 or later (GPLv3+)", "GPL-3.0-or-later"),
        ("cc-by-sa-4.0", "CC-BY-SA-4.0"), ("CC BY-NC 2.5", "CC-BY-NC-2.5"), ("CC0", "CC0-1.0"),
        ("Creative Commons Attribution-ShareAlike 4.0 International", "CC-BY-SA-4.0"),
        ("http://creativecommons.org/licenses/by/3.0/us/", "CC-BY-3.0"), ("https://opensource.org/licenses/ISC", "ISC"),
        ("https://www.gnu.org/licenses/lgpl-3.0.html", "LGPL-3.0-only"), ("https://spdx.org/licenses/0BSD.html", "0BSD"),
        ("mit or (apache-2.0 and cc0-1.0)", "MIT OR (Apache-2.0 AND CC0-1.0)"), ("MIT/Apache-2.0", "MIT OR Apache-2.0"),
        ("GPL-2.0-only WITH Classpath-exception-2.0", "GPL-2.0-only WITH Classpath-exception-2.0"),
        ("proprietary", None), ("other", None), ("", None), ("MIT OR", None), ("(" * 900, None), ("x" * 100_000, None),
        ("MIT\ud800", "MIT"), ("LicenseRef-scancode-agpl-2.0", None), ("a/b", None), ("/", None),
    ],
)  # fmt: skip
def test_names(text, spdx):
    assert to_spdx(text) == spdx


def test_tables_name_licences_of_the_list():
    assert all(parse(spdx) == spdx for spdx in {*ALIASES.values(), *(spdx for spdx, _, _ in PHRASES)})


def judge(text="text", meta=None, source="s", **options):
    counts = Counts("license")
    documents = list(run(License(**options), [Document("d", text, source, meta or {})], counts))
    return documents[0].meta if documents else dict(counts.dropped), counts


def test_the_order_of_sources():
    link, tag = "https://creativecommons.org/licenses/by/4.0/", "// SPDX-License-Identifier: GPL-2.0 OR MIT\n"
    meta = {"license": "isc", "license_link": link, "url": "u"}
    options = {"sources": {"s": "CC0-1.0"}}
    found = [
        judge(tag + MIT, meta, **options)[0],
        judge(MIT, meta, **options)[0],
        judge(MIT, {"license": "isc"}, **options)[0],
        judge("x", {"license": "isc"}, **options)[0],
        judge("x", {"license": "?"}, **options)[0],
    ]
    assert [(each["license"], each["license_from"]) for each in found] == [
        ("GPL-2.0-only OR MIT", "tag"), ("CC-BY-4.0", "link"), ("MIT", "notice"), ("ISC", "metadata"), ("CC0-1.0", "source"),
    ]  # fmt: skip
    assert found[0]["license_given"] == "isc" and found[0]["url"] == "u" and found[0]["license_link"] == link
    assert judge("x", {"license": "MIT"})[0] == {"license": "MIT", "license_from": "metadata"}
    assert judge("x", {"license": "?"})[0] == {"license": "?"}  # not understood: left as it was, and counted
    assert judge("x", {"license": "?"})[1].tally.counts["license"] == {"unknown": 1}


@pytest.mark.parametrize(
    "line, spdx",
    [
        ("/* SPDX-License-Identifier: MIT */", "MIT"), ("<!-- SPDX-License-Identifier: MIT -->", "MIT"),
        ("# SPDX-License-Identifier: (GPL-2.0+ OR BSD-2-Clause)", "GPL-2.0-or-later OR BSD-2-Clause"),
        ("// SPDX-License-Identifier: MIT\n// SPDX-License-Identifier: ISC", "ISC AND MIT"),
        ("-- SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception --", "Apache-2.0 WITH LLVM-exception"),
        ("SPDX-License-Identifier: nonsense", None), ("SPDX-License-Identifier:", None),
    ],
)  # fmt: skip
def test_tags(line, spdx):
    assert judge(line)[0].get("license") == spdx


def test_other_fields_of_the_metadata():
    assert judge(meta={"max_stars_repo_licenses": ["MIT", "Apache-2.0"]})[0]["license"] == "Apache-2.0 AND MIT"
    assert judge(meta={"licence": "CC BY 4.0"})[0]["license"] == "CC-BY-4.0"
    for value in (["MIT", "?"], [], [1], {"a": 1}, 3, None):
        assert "license_from" not in judge(meta={"license": value})[0]


def test_the_allow_list():
    allow = ("MIT", "BSD-*", "CC-BY-4.0", "apache-2.0")
    for spdx in (
        "MIT",
        "BSD-3-Clause",
        "GPL-2.0-only OR MIT",
        "MIT AND BSD-2-Clause",
        "Apache-2.0 WITH LLVM-exception",
    ):
        assert judge(meta={"license": spdx}, allow=allow)[0]["license"] == spdx
    for spdx in ("GPL-2.0-only", "MIT AND GPL-2.0-only", "CC-BY-NC-4.0", "(MIT AND ISC) OR CC-BY-SA-4.0"):
        assert judge(meta={"license": spdx}, allow=allow)[0] == {"license_not_allowed": 1}
    assert judge(allow=allow)[0] == {"license_unknown": 1}
    assert judge(allow=allow, keep_unknown=True)[0] == {}
    assert is_allowed("GPL-2.0-only WITH Classpath-exception-2.0", ("gpl-2.0-only with classpath*",))


def test_a_notice_is_looked_for_at_the_head():
    assert judge("x" * 7000 + MIT)[0] == {} and judge(MIT, header_characters=0)[0] == {}


def test_linear_time():
    for text in (
        "under " * 2000,
        "by the " * 2000,
        "SPDX-License-Identifier: " * 300,
        "(" * 6000,
        "a" * 10_000_000,
        "licen " * 1000,
        "\ud800" * 9999,
    ):
        start = time.process_time()
        judge(text)
        assert time.process_time() - start < 1


@pytest.mark.parametrize("options", [{"allow": ("MTI",)}, {"sources": {"a": "none"}}, {"header_characters": -1}])
def test_impossible_options(options):
    with pytest.raises(UserError, match=r"license\.(allow|sources|header)"):
        License(**options)
