"""The six lines in which `pyengine serve` says what it serves, how much fits, who may ask."""

from collections.abc import Mapping

from pyengine.cli.display import size_text
from pyengine.config import EngineSettings
from pyengine.server.settings import ServerSettings


def announcement(
    where: str,
    about: Mapping[str, object],
    engine: EngineSettings,
    server: ServerSettings,
    *,
    is_local: bool,
    replicas: int = 1,
) -> list[str]:
    """The lines, for an engine that describes itself as `about` and a server at `where`.

    `is_local` is True if only programs of this machine reach the address.
    """
    rows = {
        "model": _model(about, server, replicas),
        "fits": _capacity(about, engine, replicas),
        "access": _access(server, is_local),
        "pages": _pages(server),
        "store": _store(about),
    }
    return [f"serving on {where}", *(f"  {name:<6}  {text}" for name, text in rows.items())]


def _model(about: Mapping[str, object], server: ServerSettings, replicas: int) -> str:
    names = ", ".join(server.served_model_name) or str(about["model"])
    where = f"{about['device']}" if replicas == 1 else f"{replicas} replicas on {about['device']}"
    random = ", random weights (load_format: dummy)" if about.get("load_format") == "dummy" else ""
    return f"{names}: {about['dtype']} on {where}{random}"


def _capacity(about: Mapping[str, object], engine: EngineSettings, replicas: int) -> str:
    blocks, block_size = int(str(about["num_blocks"])), int(str(about["block_size"]))
    longest = int(str(about["max_model_len"]))
    seqs = replicas * engine.max_num_seqs
    tokens = replicas * blocks * block_size
    return f"{tokens:,} tokens of KV; {seqs:,} sequences of up to {longest:,} tokens at a time"


def _access(server: ServerSettings, is_local: bool) -> str:
    if server.uds is not None:
        reach = "programs that may open the socket"
    else:
        reach = "programs of this machine" if is_local else "all machines that reach the address"
    if not server.keys:
        return f"{reach}, without a key"
    count = len(server.keys)
    return f"{reach}, with {'the key' if count == 1 else f'one of {count} keys'}"


def _pages(server: ServerSettings) -> str:
    if server.admin_key:
        needed = " with an admin key"
    elif len(server.api_key) > 1:
        needed = " need an --admin-key"
    else:
        needed = " with the key" if server.api_key else ""
    return f"/kv (the pool) and /metrics{needed}; /openapi.json (the API)"


def _store(about: Mapping[str, object]) -> str:
    folder = about["kv_cache_dir"]
    if "kv_cache_store_bytes" not in about:
        return "none: the KV cache ends with the server (--kv-cache-dir DIR keeps it)"
    size = size_text(int(str(about["kv_cache_store_bytes"])))
    entries = f"{int(str(about['kv_cache_entries'])):,} entries"
    if folder == "none":
        return f"up to {size} of host memory"
    return f"{folder}: {entries}, up to {size}; access: {about['kv_cache_access']}"
