//! Events on their way to those who take them.

use crate::contents::{Contents, Spot};
use crate::events::Event;

/// Events that nobody has taken yet. What is stored is named when somebody takes them, or before the first
/// content goes: in their order either way.
#[derive(Default)]
pub(crate) struct EventLog {
    events: Vec<Event>,
    /// Contents stored since, so many rows up to each of these.
    stored: Vec<(Spot, usize)>,
}

impl EventLog {
    /// The `rows` contents up to `end` are there now.
    pub(crate) fn store(&mut self, end: Spot, rows: usize) {
        self.stored.push((end, rows));
    }

    /// A content is there no more; all that is stored was settled before.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u128) {
        debug_assert!(self.stored.is_empty());
        self.events.push(Event::Removed { hash });
    }

    /// Names what is stored.
    pub(crate) fn settle(&mut self, contents: &mut Contents) {
        for (end, rows) in self.stored.drain(..) {
            contents.tell(end, rows, &mut self.events);
        }
    }

    /// Nothing is there any more: what became of it since there were `told` events is no news.
    pub(crate) fn clear(&mut self, told: usize) {
        self.events.truncate(told);
        self.events.push(Event::Cleared);
    }

    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    pub(crate) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }
}
