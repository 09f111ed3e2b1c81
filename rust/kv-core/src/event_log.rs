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
    /// How many these are.
    num_stored: usize,
    /// At least as many as the names in the events.
    num_named: usize,
    /// So many events stay as they are: contents are added to later ones only.
    told: usize,
}

impl EventLog {
    /// The `rows` contents up to `end` are there now.
    pub(crate) fn store(&mut self, end: Spot, rows: usize) {
        self.stored.push((end, rows));
        self.num_stored += rows;
    }

    /// Contents that are to be named.
    pub(crate) fn num_stored(&self) -> usize {
        self.num_stored
    }

    /// Contents that follow each other are there no more, the last one went first; all that is stored was
    /// settled before.
    pub(crate) fn remove(&mut self, names: &[u128]) {
        debug_assert!(self.stored.is_empty());
        if names.is_empty() {
            return;
        }
        self.num_named += names.len();
        let names = names.iter().rev();
        match self.events[self.told..].last_mut() {
            Some(Event::Removed { hashes }) => hashes.extend(names),
            _ => self.events.push(Event::Removed {
                hashes: names.copied().collect(),
            }),
        }
    }

    /// Names what is stored.
    pub(crate) fn settle(&mut self, contents: &mut Contents) {
        for (end, rows) in self.stored.drain(..) {
            contents.tell(end, rows, &mut self.events);
        }
        self.num_named += std::mem::take(&mut self.num_stored);
    }

    /// Names in the events, and contents that are to be named.
    pub(crate) fn num_waiting(&self) -> usize {
        self.num_named + self.num_stored
    }

    /// What is told from here on may turn out to be no news.
    pub(crate) fn mark(&mut self) {
        self.told = self.events.len();
    }

    /// Nothing is there any more: what became of it since the mark is no news.
    pub(crate) fn clear(&mut self) {
        self.events.truncate(self.told);
        self.events.push(Event::Cleared);
    }

    pub(crate) fn take(&mut self) -> Vec<Event> {
        (self.told, self.num_named) = (0, 0);
        std::mem::take(&mut self.events)
    }
}
