//! A bounded log of sequences, with the last position of each n-gram.

use std::collections::{HashMap, VecDeque};

/// The shortest suffix that counts as a match, in tokens.
pub const MIN_MATCH: usize = 3;
/// The longest suffix that is compared, in tokens.
pub const MAX_MATCH: usize = 32;
/// Occurrences that are compared, latest first, in the sequence and in the archive each.
pub const MAX_MATCHES: usize = 64;

/// Draft tokens for a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Draft {
    /// The tokens, in order.
    pub tokens: Vec<u32>,
    /// The length of the suffix that matched: [`MIN_MATCH`] to [`MAX_MATCH`]; 0 without a draft.
    pub match_len: usize,
}

/// A token.
struct Entry {
    token: u32,
    /// Its index in its sequence.
    offset: usize,
    /// The previous position of the n-gram that begins here.
    previous: Option<u64>,
}

type Key = (u64, [u32; MIN_MATCH]);

/// A log of at most `capacity` tokens. Positions count from the first token ever added.
pub(crate) struct TokenLog {
    entries: VecDeque<Entry>,
    /// The position of the first entry.
    base: u64,
    capacity: usize,
    /// The last position of each n-gram of a namespace.
    heads: HashMap<Key, u64>,
    /// The sequences in the log, oldest first: first position and namespace.
    starts: VecDeque<(u64, u64)>,
    /// Sequences of each namespace.
    counts: HashMap<u64, usize>,
    /// Namespaces without a sequence in the log since the last `take_removed`.
    removed: Vec<u64>,
}

/// The occurrences of the longest suffix.
pub(crate) struct Matches {
    /// The length of the suffix.
    pub(crate) len: usize,
    /// The positions after it, latest first.
    ends: Vec<u64>,
}

impl TokenLog {
    pub(crate) fn new(capacity: usize) -> Self {
        TokenLog {
            entries: VecDeque::new(),
            base: 0,
            capacity,
            heads: HashMap::new(),
            starts: VecDeque::new(),
            counts: HashMap::new(),
            removed: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Begins a sequence.
    pub(crate) fn begin(&mut self, namespace: u64) {
        self.starts.push_back((self.total(), namespace));
        *self.counts.entry(namespace).or_default() += 1;
    }

    /// Appends tokens to the sequence that was begun last.
    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        let Some(&(start, namespace)) = self.starts.back() else {
            return;
        };
        for &token in tokens {
            self.entries.push_back(Entry {
                token,
                offset: (self.total() - start) as usize,
                previous: None,
            });
            let first = self.total().checked_sub(MIN_MATCH as u64);
            if let Some(first) = first.filter(|&first| first >= start.max(self.base)) {
                let previous = self.heads.insert((namespace, self.gram(first)), first);
                self.entry(first).previous = previous;
            }
            if self.entries.len() > self.capacity {
                self.remove_first();
            }
        }
    }

    /// Whether the log has a sequence of this namespace.
    pub(crate) fn contains(&self, namespace: u64) -> bool {
        self.counts.contains_key(&namespace)
    }

    /// Namespaces whose last sequence left the log since the last call.
    pub(crate) fn take_removed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.removed)
    }

    pub(crate) fn tokens(&self) -> Vec<u32> {
        self.entries.iter().map(|entry| entry.token).collect()
    }

    /// The last `len` tokens.
    pub(crate) fn suffix(&self, len: usize) -> Vec<u32> {
        let first = self.entries.len().saturating_sub(len);
        self.entries
            .range(first..)
            .map(|entry| entry.token)
            .collect()
    }

    /// The occurrences of the longest part of `suffix`, among the latest positions of its last n-gram.
    pub(crate) fn matches(&self, namespace: u64, suffix: &[u32]) -> Matches {
        let mut matches = Matches {
            len: 0,
            ends: Vec::new(),
        };
        let Some((rest, gram)) = suffix.split_last_chunk::<MIN_MATCH>() else {
            return matches;
        };
        let mut next = self.heads.get(&(namespace, *gram)).copied();
        for _ in 0..MAX_MATCHES {
            let Some(first) = next.filter(|&first| first >= self.base) else {
                break;
            };
            next = self.get(first).previous;
            let end = first + MIN_MATCH as u64;
            if !self.continues_at(end) {
                continue;
            }
            let len = MIN_MATCH + self.common_before(first, rest);
            if len > matches.len {
                matches.ends.clear();
            }
            if len >= matches.len {
                matches.len = len;
                matches.ends.push(end);
            }
        }
        matches
    }

    /// The most frequent continuation, token by token; of equally frequent ones the latest.
    pub(crate) fn follow(&self, matches: Matches, max_tokens: usize) -> Draft {
        let mut tokens = Vec::new();
        let mut left = matches.ends;
        while tokens.len() < max_tokens && !left.is_empty() {
            let mut counts: Vec<(u32, usize)> = Vec::new();
            for &position in &left {
                let token = self.get(position).token;
                match counts.iter_mut().find(|(counted, _)| *counted == token) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((token, 1)),
                }
            }
            let largest = counts.iter().map(|&(_, count)| count).max();
            let best = counts.iter().find(|&&(_, count)| Some(count) == largest);
            let Some(&(token, _)) = best else { break };
            tokens.push(token);
            left.retain(|&position| self.get(position).token == token);
            left.iter_mut().for_each(|position| *position += 1);
            left.retain(|&position| self.continues_at(position));
        }
        let match_len = if tokens.is_empty() { 0 } else { matches.len };
        Draft { tokens, match_len }
    }

    /// How many tokens before `first`, in its sequence, are equal to the end of `rest`.
    fn common_before(&self, first: u64, rest: &[u32]) -> usize {
        let in_log = (first - self.base) as usize;
        let max_len = self
            .get(first)
            .offset
            .min(in_log)
            .min(MAX_MATCH - MIN_MATCH);
        let mut count = 0;
        while count < max_len.min(rest.len())
            && self.get(first - 1 - count as u64).token == rest[rest.len() - 1 - count]
        {
            count += 1;
        }
        count
    }

    /// Whether a sequence continues at a position.
    fn continues_at(&self, position: u64) -> bool {
        position < self.total() && self.get(position).offset > 0
    }

    fn total(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    fn get(&self, position: u64) -> &Entry {
        &self.entries[(position - self.base) as usize]
    }

    fn entry(&mut self, position: u64) -> &mut Entry {
        &mut self.entries[(position - self.base) as usize]
    }

    fn gram(&self, first: u64) -> [u32; MIN_MATCH] {
        std::array::from_fn(|at| self.get(first + at as u64).token)
    }

    /// Removes the first token, and the n-gram that begins there unless it has a later position.
    fn remove_first(&mut self) {
        let Some(&(start, namespace)) = self.starts.front() else {
            return;
        };
        let next = self.starts.get(1).map_or(self.total(), |&(next, _)| next);
        if self.base + MIN_MATCH as u64 <= next {
            let key = (namespace, self.gram(self.base));
            if self.heads.get(&key) == Some(&self.base) {
                self.heads.remove(&key);
            }
        }
        debug_assert!(start <= self.base);
        self.entries.pop_front();
        self.base += 1;
        if self.base >= next {
            self.starts.pop_front();
            if let Some(count) = self.counts.get_mut(&namespace) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&namespace);
                    self.removed.push(namespace);
                }
            }
        }
    }
}
