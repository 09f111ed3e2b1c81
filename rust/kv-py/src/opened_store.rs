//! A store that handles share, until it is closed.

use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_store::Store;
use pyo3::prelude::*;

use crate::errors::StoreError;

/// A store until it is closed, and the process that opened it.
pub(crate) struct OpenedStore {
    store: Mutex<Option<Arc<Store>>>,
    process: u32,
    name: String,
}

impl OpenedStore {
    pub(crate) fn new(store: Store, name: String) -> Self {
        Self {
            store: Mutex::new(Some(Arc::new(store))),
            process: process::id(),
            name,
        }
    }

    /// The store, or `None` if it is closed. An error in a process that was forked from the one that opened it: the
    /// thread that writes is not there.
    pub(crate) fn store(&self) -> PyResult<Option<Arc<Store>>> {
        Ok(self.lock()?.clone())
    }

    /// The store, which is closed from now on.
    pub(crate) fn take(&self) -> PyResult<Option<Arc<Store>>> {
        Ok(self.lock()?.take())
    }

    /// Its folder, as messages name it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, Option<Arc<Store>>>> {
        let here = process::id();
        if here == self.process {
            return Ok(self.store.lock().unwrap_or_else(PoisonError::into_inner));
        }
        let Self { process, name, .. } = self;
        Err(StoreError::new_err(format!(
            "process {process} opened the KV store {name}, this is process {here}: open it after the fork"
        )))
    }
}

impl Drop for OpenedStore {
    /// Waits for the writer without the GIL.
    fn drop(&mut self) {
        let Some(store) = self
            .store
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        else {
            return;
        };
        if process::id() != self.process {
            return std::mem::forget(store); // its locks may be held by threads that are not here
        }
        let mut store = Some(store);
        let mut end = || drop(store.take());
        if Python::try_attach(|py| py.detach(&mut end)).is_none() {
            end();
        }
    }
}
