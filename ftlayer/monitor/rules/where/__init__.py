"""The filter language of records: ``operator = parse and reason ~ timeout and record.price > 10 and age > 5m``.

=====================  ======================================================================================
word                   of a record
=====================  ======================================================================================
``stream``             its stream, or its job, by any of their names; ``=`` and ``!=`` alone
``operator``           where the last attempt failed
``reason``             why
``key``                its key, hexadecimal; ``=`` and ``!=`` alone
``root``, ``origin``   its id, the id of its first attempt: 16 hexadecimal digits; ``=`` and ``!=`` alone
``attempt``            how many it has had
``age``                the time since its last failure: ``30s``, ``5m``, ``1h``
``record``             all of it, as JSON; ``record.price`` a column, ``record.who.name`` a field of one,
                       ``record."odd name"`` one that is no word
=====================  ======================================================================================

Comparisons are ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``~`` (contains) and ``!~``, joined by ``and``, ``or``,
``not`` and parentheses. Values are words or in double quotes, as in JSON. A value without quotes that is a number
compares as one, also with text that is one; ``true``, ``false`` and ``null`` are JSON's. Text is compared by its
characters, upper and lower case apart. What a record does not have equals ``null`` alone, and is neither less nor more.
"""

from __future__ import annotations

from ftlayer.monitor.rules.where.filter import Where as Where
from ftlayer.monitor.rules.where.filter import parse_where as parse_where
