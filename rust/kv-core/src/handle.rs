//! Handles of sequences and plans: to drop one is to end what it owns.

use crate::ids::{PlanKey, SeqKey};
use crate::shared::{Dropped, Shared};
use crate::sync::{Arc, Ordering};

/// Owns a sequence: dropping it frees the sequence, at the manager's next call.
#[derive(Debug)]
pub struct SeqHandle {
    shared: Arc<Shared>,
    key: SeqKey,
}

impl SeqHandle {
    pub(crate) fn new(shared: &Arc<Shared>, key: SeqKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
        }
    }

    /// What the manager's calls take.
    pub fn key(&self) -> SeqKey {
        self.key
    }

    /// The sequence's number, unique in its manager and never reused.
    pub fn id(&self) -> u64 {
        self.key.id
    }
}

impl Drop for SeqHandle {
    fn drop(&mut self) {
        self.shared.post([Dropped::Sequence(self.key)]);
    }
}

/// Owns an open plan: dropping it rolls the plan back, at the manager's next call.
#[derive(Debug)]
pub struct PlanHandle {
    shared: Arc<Shared>,
    key: PlanKey,
}

impl PlanHandle {
    pub(crate) fn new(shared: &Arc<Shared>, key: PlanKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
        }
    }

    /// What the manager's calls take.
    pub fn key(&self) -> PlanKey {
        self.key
    }
}

impl Drop for PlanHandle {
    fn drop(&mut self) {
        if self.key.serial > self.shared.last_closed_plan.load(Ordering::Acquire) {
            self.shared.post([Dropped::Plan(self.key)]);
        }
    }
}
