//! Why no cached block follows a match.

use super::Pool;
use crate::explain::{MissReason, PastEviction};
use crate::ids::NodePosition;
use crate::switch::Label;

/// Cached blocks after a match that are compared with the prompt: the newest ones.
const MAX_NEIGHBOURS: usize = 64;

impl Pool {
    /// Why no block with these tokens follows `last`, the end of a match of `position` tokens.
    pub(crate) fn explain_block(
        &mut self,
        last: NodePosition,
        (block, label): (&[u32], Option<&Label>),
        namespace: &[u8],
        position: usize,
    ) -> MissReason {
        let last = last.some();
        let is_known = last.is_some_and(|last| self.next(last, block, label).is_some());
        let eviction = self.find_eviction(last, (block, label), namespace);
        if is_known || eviction.is_some() {
            return MissReason::Evicted(eviction);
        }
        let nearest = last.and_then(|last| {
            self.tree
                .longest_partial_match(last, block, label, 0, MAX_NEIGHBOURS, |_| true)
        });
        match nearest {
            Some((near, agrees)) if position + agrees > 0 => MissReason::Diverged {
                position: position + agrees,
                tokens: self.tree.tokens(near)[agrees..].to_vec(),
            },
            _ => MissReason::New,
        }
    }

    fn find_eviction(
        &mut self,
        last: Option<NodePosition>,
        (block, label): (&[u32], Option<&Label>),
        namespace: &[u8],
    ) -> Option<PastEviction> {
        self.history.as_ref()?;
        let parent = match last {
            Some(last) => self.tree.hash(last)?,
            None => self.tree.hasher().root(namespace),
        };
        let hasher = self.tree.hasher();
        let parent = match label {
            Some(Label { offset, name }) => hasher.switch(parent, *offset, name),
            None => parent,
        };
        let hash = hasher.child(parent, block);
        self.history.as_ref()?.find(namespace, hash)
    }
}
