"""A router that follows the cache events of two replicas. It needs neither Ray nor a model.

The replicas are block managers. Prompts come from four tenants, each with its own long preamble.
Each replica has space for two preambles.
"""

from random import Random

from pyengine import BlockManager
from pyengine.cluster.feed import EventLog
from pyengine.cluster.messages import CacheFormat, Load, ReplicaInfo
from pyengine.cluster.prefix_router import PrefixRouter

BLOCK, BLOCKS, PREAMBLE, TENANTS = 16, 24, 160, 4
KIND = CacheFormat("toy", BLOCK, hash_seed=0)


class Replica:
    """A block manager that computes one prompt at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.manager = BlockManager(BLOCKS, BLOCK, events=True, hash_seed=KIND.hash_seed)
        self.log = EventLog(self.manager)

    def serve(self, prompt: list[int]) -> int:
        """Compute a prompt. Returns the number of its tokens that came from the cache."""
        sequence = self.manager.sequence(prompt)
        plan = self.manager.begin_step(len(prompt))
        plan.prefill(sequence, len(prompt))
        plan.copies()
        plan.commit([0])
        cached = sequence.num_cached_tokens
        sequence.free()
        return cached


def prompts() -> list[list[int]]:
    """Eighty prompts in random order, each a tenant's preamble and a question."""
    random = Random(0)
    found = []
    for number in range(80):
        tenant = random.randrange(TENANTS)
        preamble = range(tenant * 1_000, tenant * 1_000 + PREAMBLE)
        found.append([*preamble, *(10_000 + number * 20 + at for at in range(20))])
    return found


def by_turns() -> int:
    """The number of cached tokens if the replicas take turns."""
    replicas = [Replica("0"), Replica("1")]
    return sum(replicas[at % 2].serve(prompt) for at, prompt in enumerate(prompts()))


def by_prefix() -> int:
    """The number of cached tokens if the router chooses."""
    router = PrefixRouter(KIND)
    replicas = {name: Replica(name) for name in ("0", "1")}
    for replica in replicas.values():
        router.join(ReplicaInfo(replica.name, KIND, BLOCKS))
        router.restore(replica.name, replica.log.snapshot(Load()))
    cached = 0
    for prompt in prompts():
        choice = router.choose(prompt)
        ticket = router.begin(choice)
        replica = replicas[choice.replica]
        cached += replica.serve(prompt)
        router.apply(replica.name, replica.log.take(Load()))  # blocks stored and evicted
        if ticket is not None:  # None: the replica has left
            router.end(ticket)
    return cached


def main() -> None:
    """Compare both ways to choose a replica."""
    total = sum(map(len, prompts()))
    turns, prefix = by_turns(), by_prefix()
    print(f"{total} prompt tokens")
    print(f"in turns: {turns} from the cache")
    print(f"by prefix: {prefix} from the cache")


if __name__ == "__main__":
    main()
