//! The one place where the core's errors become Python's: one exception per decision a caller can take.

use forks::Forked;
use kv_core::Error;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

macro_rules! exceptions {
    ($($name:ident: $base:ty, $doc:literal;)*) => {
        $(create_exception!(pyengine._kv, $name, $base, $doc);)*

        /// Adds the exceptions to the module.
        pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
            $(module.add(stringify!($name), module.py().get_type::<$name>())?;)*
            Ok(())
        }
    };
}

exceptions! {
    KvError: PyException, "Base of all errors of the block manager. The call that raised it has changed nothing.";
    ConfigError: KvError, "A setting is invalid, such as `block_size` 0, or a pool whose tables do not fit into memory.";
    TokenError: KvError, "Token ids are missing, are not integers, or do not fit 32 unsigned bits.";
    HandleError: KvError, "The handle is a freed sequence, a released pin, or belongs to another manager; or the object was made by the process of which this one is a fork.";
    PinError: KvError, "The pin cannot be attached: it is not a prefix of the sequence, earlier weights computed it, or the sequence holds blocks.";
    PlanError: KvError, "A plan, a planned sequence or a transfer is used in the wrong order, or with a wrong number of tokens or blocks.";
    BufferError: KvError, "An array is too small, not writable, not contiguous, of another type, or does not fit the others.";
    TraceError: KvError, "A recording cannot begin, or a file cannot be replayed: it has another format or version, or is truncated or damaged.";
    StoreError: KvError, "A KV store cannot be opened, is closed, was opened by another process, or has an entry of another length.";
    InvariantError: KvError, "`check()` found a difference, which is a bug in the manager: please report it.";
}

/// Every error of the core as a Python exception.
pub(crate) fn raise(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::OutOfRange { .. }
        | Error::Namespace { .. }
        | Error::EmptySwitch { .. }
        | Error::SwitchPosition { .. }
        | Error::UnknownPolicy(_)
        | Error::OutOfMemory { .. }
        | Error::UnknownGroup { .. }
        | Error::TooFew { .. }
        | Error::UnknownBlock { .. } => ConfigError::new_err(text),
        Error::EmptySequence | Error::ForkLength { .. } => TokenError::new_err(text),
        Error::FreedSequence { .. }
        | Error::WrongManager { .. }
        | Error::PinOfAnotherManager { .. }
        | Error::ReleasedPin => HandleError::new_err(text),
        Error::PinMismatch { .. } | Error::NotFresh { .. } | Error::OldPin { .. } => {
            PinError::new_err(text)
        }
        Error::InPlan { .. }
        | Error::NotPlanned { .. }
        | Error::NotDecoding { .. }
        | Error::NothingToCompute { .. }
        | Error::PlanOpen { .. }
        | Error::WeightsInUse { .. }
        | Error::PlanOrder { .. }
        | Error::PlanClosed { .. }
        | Error::TrimBelowComputed { .. }
        | Error::TransferEnded { .. }
        | Error::TransferBlocks { .. }
        | Error::NotExtended { .. }
        | Error::SnapshotPosition { .. }
        | Error::SharedBlock { .. }
        | Error::NotKnown { .. }
        | Error::Accepted { .. }
        | Error::CopiesNotRead { .. }
        | Error::DraftCount { .. }
        | Error::SampleCount { .. } => PlanError::new_err(text),
        Error::BufferTooSmall { .. } | Error::BufferTooNarrow { .. } => BufferError::new_err(text),
        Error::Recording | Error::NotNew { .. } => TraceError::new_err(text),
    }
}

/// The error for an object that the process made of which this one is a fork.
#[cold]
pub(crate) fn forked(error: Forked) -> PyErr {
    HandleError::new_err(error.to_string())
}

/// The error for an array that gives no buffer, caused by `error`; an interrupt as it is.
pub(crate) fn no_buffer(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(py) {
        return error;
    }
    let refused = BufferError::new_err(format!("array {name} has no buffer: {error}"));
    refused.set_cause(py, Some(error));
    refused
}
