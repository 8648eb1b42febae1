"""A model's file taken apart and put together again, as a hostile hand would do it."""

import json
import zlib
from pathlib import Path


class Parts:
    """The header, the texts and the bytes of a file; `data()` signs what was changed, as fxq does."""

    def __init__(self, path):
        raw = Path(path).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        self.header = json.loads(raw[8 : 8 + length])
        self.texts = self.header.pop("__metadata__")
        self.body = raw[8 + length :]
        self.model = json.loads(self.texts["model"])
        self.tensors = json.loads(self.texts["tensors"])
        self.history = json.loads(self.texts["history"])
        self.recipe = json.loads(self.texts["recipe"])

    def bytes_of(self, name):
        begin, end = self.header[name]["data_offsets"]
        return self.body[begin:end]

    def put(self, name, values):
        """Other bytes, as many, for a tensor."""
        begin, end = self.header[name]["data_offsets"]
        assert len(values) == end - begin
        self.body = self.body[:begin] + values + self.body[end:]

    def data(self, texts=None):
        """The file. Texts that are given stand in it as they are, all else as these parts say."""
        for name, about in self.tensors.items() if isinstance(self.tensors, dict) else ():
            if isinstance(about, dict) and name in self.header and about.get("checksum"):
                about["checksum"] = zlib.crc32(self.bytes_of(name))
        plain_data = {"tensors": self.tensors, "model": self.model, "history": self.history, "recipe": self.recipe}
        written = {**self.texts, **{name: json.dumps(value) for name, value in plain_data.items()}, **(texts or {})}
        rest = {name: text for name, text in written.items() if name != "checksum"}
        written["checksum"] = str(zlib.crc32(json.dumps(rest, sort_keys=True).encode()))
        header = json.dumps({"__metadata__": written, **self.header}).encode()
        header += b" " * (-(len(header) + 8) % 64)
        return len(header).to_bytes(8, "little") + header + self.body
