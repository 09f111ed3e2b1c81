//! The suite passes a correct manager and finds each flaw of a wrong one.
#![allow(clippy::unwrap_used)]

mod naive;

use kv_conformance::{Runs, check};
use naive::{Naive, flaw};

#[test]
fn a_correct_manager_passes_and_everything_was_looked_at() {
    let report = check(&Runs::default(), |blocks, size| {
        Naive::new(flaw::NONE, blocks, size)
    })
    .unwrap();
    assert!(report.steps > 1000, "{report:?}");
    assert!(report.cached_tokens > 1000, "{report:?}");
    assert!(report.refusals > 1000, "{report:?}");
}

#[test]
fn each_flaw_is_found_by_few_operations() {
    for (flaw, says) in flaw::ALL {
        let verdict = check(&Runs::default(), |blocks, size| {
            Naive::new(flaw, blocks, size)
        });
        let failure = verdict.expect_err(&format!("flaw {flaw}"));
        assert!(failure.difference.contains(says), "flaw {flaw}: {failure}");
        assert!(failure.operations.len() <= 24, "flaw {flaw}: {failure}");
    }
}
