"""Mutants of `fxpasses.passes.compress`: see `bench.mutations`."""

WRITTEN = (
    (
        "only the first bucket",
        "for b in filled_buckets(graph, self.name)]",
        "for b in filled_buckets(graph, self.name)[:1]]",
    ),
    ("poisons what it keeps", "torch.where(finite, *pair)", "torch.where(finite | True, *pair)"),
    ("keeps the old states", "torch.where(finite, *pair)", "torch.where(finite & False, *pair)"),
    ("a sum is a mean", "(mean * scale if scale != 1 else mean)", "mean"),
    ("second legs not sent", "if (one.exchange or self._dense).legs == 2:", "if False:"),
    ("first leg marked", "if exchange.first_leg_reduces:", "if True:"),
    ("what says how is a way", 'node.meta["encoding"] = True', "pass"),
    ("states swapped", "zip(news, olds, strict=True)]", "zip(news[::-1], olds, strict=True)]"),
)
KNOWN = {
    "branch: x if exchange is None else exchange.telling(x) -> x": (
        "what tells of a bucket is there to spare a look at all of it"
    ),
}
EQUIVALENT: dict[str, str] = {
    "keyword: min((one.bucket.readers[0] for one in sent), key=order.__getitem__) "
    "-> min((one.bucket.readers[0] for one in sent))": "torch compares nodes by their place",
    "branch: mean * scale if scale != 1 else mean -> mean * scale": "once a value is that value",
}
