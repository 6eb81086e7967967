import itertools

import pytest

from mor_kernels.decode.text import TextStream


class Bytes:
    """Tokens are byte strings."""

    def decode(self, tokens):
        return b"".join(tokens).decode("utf-8", errors="replace")


def pieces(tokens, stop=()):
    stream = TextStream(Bytes(), stop)
    out = []
    for token in tokens:
        out.append(stream.push(token))
        if stream.stopped:
            break
    out.append(stream.flush())
    return out, stream.stopped


def splits(data, most=4):
    """The byte string cut into tokens in every way that has up to `most` cuts."""
    for count in range(most + 1):
        for cuts in itertools.combinations(range(1, len(data)), count):
            yield [data[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)))]


def test_characters_come_out_whole_however_they_are_cut():
    for text in ("aé€😀b", "€😀", "ab"):
        for tokens in splits(text.encode()):
            out, _ = pieces(tokens)
            assert "".join(out) == text
            assert not any("\ufffd" in piece for piece in out)


def test_characters_are_not_held_longer_than_needed():
    assert pieces(["é".encode()[:1], "é".encode()[1:], b"a"])[0] == ["", "é", "a", ""]


def test_broken_bytes_come_out_in_the_end():
    for tokens in ([b"a", b"\xff"], [b"a", b"\xff", b"\xe2\x82"], [b"\xff"] * 9 + [b"z"]):
        assert "".join(pieces(tokens)[0]) == Bytes().decode(tokens)


@pytest.mark.parametrize("text", ["one END two", "one EN two", "oEEND", "aababaabc x", "END", "no stop E"])
def test_stop_strings_over_token_boundaries(text):
    stop = ("END", "babaab")
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    want = text[: min(ends)[1]] if ends else text
    for tokens in splits(text.encode(), 3):
        out, stopped = pieces(tokens, stop)
        assert ("".join(out), stopped) == (want, bool(ends))


def test_the_stop_string_completed_first_wins_however_the_text_is_cut():
    for tokens in splits(b"xabcd"):
        assert "".join(pieces(tokens, ("abcd", "b"))[0]) == "xa"


def test_text_is_held_only_while_it_may_begin_a_stop_string():
    assert pieces([b"a", b"E", b"x", b"E", b"N"], ("END",))[0] == ["a", "", "Ex", "", "", "EN"]


def test_a_tokenizer_that_panics():
    class PanicException(BaseException):  # as those of packages written in Rust
        pass

    class Words:
        def decode(self, tokens):
            raise PanicException("index out of bounds") if tokens[-1] else KeyboardInterrupt

    with pytest.raises(ValueError, match=r"^tokenizer: expected one that can decode its tokens, got: index"):
        TextStream(Words()).push(1)
    with pytest.raises(KeyboardInterrupt):
        TextStream(Words()).push(0)


def test_a_tokenizer_that_strips_the_first_space():
    class Words:
        def decode(self, tokens):
            return "".join(tokens).replace("_", " ").removeprefix(" ")

    stream = TextStream(Words())
    assert [stream.push(t) for t in ["_one", "_two", ",", "_three"]] == ["one", " two", ",", " three"]
