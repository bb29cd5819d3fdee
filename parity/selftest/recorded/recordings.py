"""The recordings of the repository, opened for tests."""

from parity.recorded.files import Recording, read_file, read_index
from parity.selftest.helpers import OFFICIAL
from reference.indexer import IndexerParams

ENTRIES = {entry["file"].removesuffix(".safetensors"): entry for entry in read_index(OFFICIAL)}


def opened(name: str) -> Recording:
    return read_file(OFFICIAL, ENTRIES[name])


def shared_params(recording: Recording) -> dict[str, IndexerParams]:
    name = recording.entry.get("params") or recording.entry.get("config", {}).get("params")
    return {name: IndexerParams.from_tensors(opened(f"params_{name}").tensors)} if name else {}
