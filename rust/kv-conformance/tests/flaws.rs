//! The suite passes a correct manager and finds each flaw of a wrong one.
#![allow(clippy::unwrap_used)]

mod naive;

use kv_conformance::{Failure, Runs, check};
use naive::{Naive, flaw};

#[test]
fn a_correct_manager_passes_and_everything_was_looked_at() {
    let report = check(&Runs::default(), Naive::<{ flaw::NONE }>::new).unwrap();
    assert!(report.steps > 1000, "{report:?}");
    assert!(report.cached_tokens > 1000, "{report:?}");
    assert!(report.refusals > 1000, "{report:?}");
}

fn failure<const FLAW: u8>() -> Failure {
    let found = check(&Runs::default(), Naive::<FLAW>::new);
    found.expect_err(&format!("flaw {FLAW}"))
}

#[test]
fn each_flaw_is_found_by_few_operations() {
    let found = [
        failure::<{ flaw::IGNORES_PREFIX }>(),
        failure::<{ flaw::IGNORES_NAMESPACE }>(),
        failure::<{ flaw::MATCHES_EVICTED }>(),
        failure::<{ flaw::LEAKS }>(),
        failure::<{ flaw::KEEPS_AFTER_REFUSAL }>(),
        failure::<{ flaw::REFUSES_TOO_MUCH }>(),
        failure::<{ flaw::NEVER_REUSES }>(),
        failure::<{ flaw::NEVER_MERGES }>(),
        failure::<{ flaw::SHARES_PARTIAL_BLOCKS }>(),
        failure::<{ flaw::REUSES_LAST_TOKEN }>(),
    ];
    for (failure, (flaw, says)) in found.iter().zip(flaw::ALL) {
        assert!(failure.difference.contains(says), "flaw {flaw}: {failure}");
        assert!(failure.operations.len() <= 24, "flaw {flaw}: {failure}");
    }
}
