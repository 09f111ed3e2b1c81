//! Any bytes, as a recording: a replay may say no, but it neither panics nor takes more memory than
//! the bytes are worth. Built for fuzzing, the reader does not look at checks, so that changed bytes
//! get past them.

#![no_main]

use kv_trace::{Limits, replay_within};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits {
    num_blocks: 256,
    tokens: 1 << 16,
    operation: 1 << 16,
};

fuzz_target!(|recording: &[u8]| {
    if let Ok(report) = replay_within(recording, LIMITS) {
        assert_eq!(report.check, Ok(()));
    }
});
