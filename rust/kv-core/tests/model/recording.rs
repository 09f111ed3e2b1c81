//! A recording in memory that can be looked at while it is written.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
pub(crate) struct Recording(Arc<Mutex<Vec<u8>>>);

impl Recording {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.lock().expect("sound").clone()
    }
}

impl Write for Recording {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("sound").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
