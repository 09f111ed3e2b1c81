//! Errors name their values.

use std::io;

use kv_core::Error;
use kv_trace::TraceError;

#[test]
fn a_trace_error_names_its_values() {
    let disk = || io::Error::other("the disk is gone");
    let errors: [(TraceError, &[&str]); 9] = [
        (disk().into(), &["cannot read", "the disk is gone"]),
        (TraceError::NotATrace, &["not a recording"]),
        (
            TraceError::Version {
                found: 7,
                supported: 2,
                recorded_by: None,
            },
            &["format 7", "format 2", "the version that wrote it"],
        ),
        (
            TraceError::Version {
                found: 1,
                supported: 2,
                recorded_by: Some("8.9.10".into()),
            },
            &["format 1", "version 8.9.10", "record again"],
        ),
        (
            TraceError::Limit {
                what: "this many".into(),
                found: 11,
                limit: 10,
            },
            &["this many is 11", "10 at most"],
        ),
        (
            TraceError::Config(Error::OutOfRange {
                name: "block_size",
                min: 1,
                max: 65_536,
                given: 0,
            }),
            &["refused", "block_size must be 1 to 65536, got 0"],
        ),
        (
            TraceError::Cut {
                byte: 12,
                operation: 0,
            },
            &["byte 12", "its header"],
        ),
        (
            TraceError::Cut {
                byte: 12,
                operation: 13,
            },
            &["byte 12", "operation 13"],
        ),
        (
            TraceError::Corrupt {
                byte: 14,
                operation: 15,
                what: "nonsense".into(),
            },
            &["byte 14", "operation 15", "nonsense"],
        ),
    ];
    for (error, words) in errors {
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{error:?}: {text:?} lacks {word:?}");
        }
    }
}

#[test]
fn a_trace_error_has_the_source_that_it_wraps() {
    use std::error::Error as _;
    let source = |error: TraceError| error.source().map(ToString::to_string);
    let disk = TraceError::from(io::Error::other("the disk is gone"));
    assert_eq!(source(disk), Some("the disk is gone".into()));
    let refused = Error::EmptySequence;
    let text = refused.to_string();
    assert_eq!(source(TraceError::Config(refused)), Some(text));
    assert_eq!(source(TraceError::NotATrace), None);
}
