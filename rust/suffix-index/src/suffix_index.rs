//! The index: growing sequences and the archive.

use std::collections::HashMap;
use std::sync::Arc;

use crate::token_log::{Draft, MAX_MATCH, MIN_MATCH, TokenLog};

struct Sequence {
    namespace: u64,
    num_prompt: usize,
    log: TokenLog,
}

/// The sequences that grow, and an archive of finished ones.
pub struct SuffixIndex {
    archive: TokenLog,
    /// The ids of namespaces.
    ids: HashMap<Arc<[u8]>, u64>,
    namespaces: HashMap<u64, Namespace>,
    sequences: HashMap<u64, Sequence>,
    next: u64,
}

/// A namespace that has a sequence in the index.
struct Namespace {
    name: Arc<[u8]>,
    num_growing: usize,
}

impl SuffixIndex {
    /// An index with an archive of up to `max_tokens` tokens, at least one.
    pub fn new(max_tokens: usize) -> Self {
        SuffixIndex {
            archive: TokenLog::new(max_tokens.max(1)),
            ids: HashMap::new(),
            namespaces: HashMap::new(),
            sequences: HashMap::new(),
            next: 0,
        }
    }

    /// Adds a sequence that begins with a prompt; returns its id.
    pub fn start(&mut self, namespace: &[u8], prompt: &[u32]) -> u64 {
        let id = self.next;
        self.next += 1;
        let namespace = self.enter(namespace, id);
        let mut log = TokenLog::new(usize::MAX);
        log.begin(namespace);
        log.extend(prompt);
        let sequence = Sequence {
            namespace,
            num_prompt: prompt.len(),
            log,
        };
        self.sequences.insert(id, sequence);
        id
    }

    /// Counts a sequence of a namespace; returns the namespace's id, `new_id` for a new one.
    fn enter(&mut self, name: &[u8], new_id: u64) -> u64 {
        let id = match self.ids.get(name) {
            Some(&id) => id,
            None => {
                let name: Arc<[u8]> = name.into();
                self.ids.insert(Arc::clone(&name), new_id);
                self.namespaces.insert(
                    new_id,
                    Namespace {
                        name,
                        num_growing: 0,
                    },
                );
                new_id
            }
        };
        let namespace = self.namespaces.get_mut(&id);
        namespace.expect("it has an id").num_growing += 1;
        id
    }

    /// Removes a namespace without sequences, neither growing nor archived.
    fn forget_unused(&mut self, id: u64) {
        let namespace = self.namespaces.get(&id);
        let is_unused =
            |namespace: &&Namespace| namespace.num_growing == 0 && !self.archive.contains(id);
        let Some(unused) = namespace.filter(is_unused) else {
            return;
        };
        self.ids.remove(&unused.name);
        self.namespaces.remove(&id);
    }

    /// Appends tokens to a sequence; false for an unknown one.
    pub fn extend(&mut self, sequence: u64, tokens: &[u32]) -> bool {
        let sequence = self.sequences.get_mut(&sequence);
        sequence
            .map(|sequence| sequence.log.extend(tokens))
            .is_some()
    }

    /// Moves the output of a sequence into the archive, with the last [`MIN_MATCH`] tokens of its prompt.
    /// Does nothing for an unknown one.
    pub fn finish(&mut self, sequence: u64) {
        let Some(sequence) = self.sequences.remove(&sequence) else {
            return;
        };
        let tokens = sequence.log.tokens();
        if tokens.len() > sequence.num_prompt {
            self.archive.begin(sequence.namespace);
            self.archive
                .extend(&tokens[sequence.num_prompt.saturating_sub(MIN_MATCH)..]);
        }
        if let Some(namespace) = self.namespaces.get_mut(&sequence.namespace) {
            namespace.num_growing -= 1;
        }
        self.forget_unused(sequence.namespace);
        for namespace in self.archive.take_removed() {
            self.forget_unused(namespace);
        }
    }

    /// Up to `max_tokens` draft tokens for a sequence; none for an unknown one.
    pub fn draft(&self, sequence: u64, max_tokens: usize) -> Draft {
        let Some(sequence) = self.sequences.get(&sequence) else {
            return Draft::default();
        };
        let suffix = sequence.log.suffix(MAX_MATCH);
        let own = sequence.log.matches(sequence.namespace, &suffix);
        let archived = self.archive.matches(sequence.namespace, &suffix);
        match own.len >= archived.len {
            true => sequence.log.follow(own, max_tokens),
            false => self.archive.follow(archived, max_tokens),
        }
    }

    /// Tokens in the archive.
    pub fn num_archived(&self) -> usize {
        self.archive.len()
    }

    /// Sequences that grow.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Namespaces that have a sequence, growing or archived.
    pub fn num_namespaces(&self) -> usize {
        self.namespaces.len()
    }
}
