//! Texts one after the other, the oldest tokens forgotten, and where each gram stood last.

use std::collections::{HashMap, VecDeque};

use crate::{GRAM, Guess, LONGEST, MOST_PLACES};

/// A token: where in its text it stands, and the place before at which the gram that begins here stood.
struct Entry {
    token: u32,
    offset: usize,
    before: Option<u64>,
}

type Key = (u64, [u32; GRAM]);

/// A log of at most `capacity` tokens. Places count from the first token that there ever was.
pub(crate) struct Log {
    entries: VecDeque<Entry>,
    /// The place of the first entry.
    base: u64,
    capacity: usize,
    /// Where each gram of a namespace stood last.
    heads: HashMap<Key, u64>,
    /// Of the texts in the log, the oldest first: where each begins, and its namespace.
    starts: VecDeque<(u64, u64)>,
    /// Texts of each namespace.
    counts: HashMap<u64, usize>,
    /// Namespaces whose last text was forgotten, until somebody takes note.
    gone: Vec<u64>,
}

/// Where the longest part of an end stands: the places behind it, the latest first.
pub(crate) struct Places {
    pub(crate) support: usize,
    behind: Vec<u64>,
}

impl Log {
    pub(crate) fn new(capacity: usize) -> Self {
        Log {
            entries: VecDeque::new(),
            base: 0,
            capacity,
            heads: HashMap::new(),
            starts: VecDeque::new(),
            counts: HashMap::new(),
            gone: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Begins a text.
    pub(crate) fn begin(&mut self, namespace: u64) {
        self.starts.push_back((self.total(), namespace));
        *self.counts.entry(namespace).or_default() += 1;
    }

    /// Adds tokens to the text that was begun last.
    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        let Some(&(start, namespace)) = self.starts.back() else {
            return;
        };
        for &token in tokens {
            self.entries.push_back(Entry {
                token,
                offset: (self.total() - start) as usize,
                before: None,
            });
            let first = self.total().checked_sub(GRAM as u64);
            if let Some(first) = first.filter(|&first| first >= start.max(self.base)) {
                let before = self.heads.insert((namespace, self.gram(first)), first);
                self.entry(first).before = before;
            }
            if self.entries.len() > self.capacity {
                self.forget_first();
            }
        }
    }

    /// Whether a text of this namespace is in the log.
    pub(crate) fn holds(&self, namespace: u64) -> bool {
        self.counts.contains_key(&namespace)
    }

    /// Namespaces of which no text is in the log any more, since the last call.
    pub(crate) fn take_gone(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.gone)
    }

    pub(crate) fn tokens(&self) -> Vec<u32> {
        self.entries.iter().map(|entry| entry.token).collect()
    }

    /// The last `most` tokens.
    pub(crate) fn end(&self, most: usize) -> Vec<u32> {
        let first = self.entries.len().saturating_sub(most);
        self.entries.range(first..).map(|one| one.token).collect()
    }

    /// Where the longest part of `end` stands, of the latest places of its last gram.
    pub(crate) fn places(&self, namespace: u64, end: &[u32]) -> Places {
        let mut found = Places {
            support: 0,
            behind: Vec::new(),
        };
        let Some((rest, gram)) = end.split_last_chunk::<GRAM>() else {
            return found;
        };
        let mut at = self.heads.get(&(namespace, *gram)).copied();
        for _ in 0..MOST_PLACES {
            let Some(first) = at.filter(|&first| first >= self.base) else {
                break;
            };
            at = self.get(first).before;
            let behind = first + GRAM as u64;
            if !self.is_within_text(behind) {
                continue;
            }
            let support = GRAM + self.same_before(first, rest);
            if support > found.support {
                found.behind.clear();
            }
            if support >= found.support {
                found.support = support;
                found.behind.push(behind);
            }
        }
        found
    }

    /// What most of the places go on with, token by token; of equally many that of the latest place.
    pub(crate) fn follow(&self, places: Places, most: usize) -> Guess {
        let mut tokens = Vec::new();
        let mut left = places.behind;
        while tokens.len() < most && !left.is_empty() {
            let mut counts: Vec<(u32, usize)> = Vec::new();
            for &place in &left {
                let token = self.get(place).token;
                match counts.iter_mut().find(|(one, _)| *one == token) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((token, 1)),
                }
            }
            let largest = counts.iter().map(|&(_, count)| count).max();
            let best = counts.iter().find(|&&(_, count)| Some(count) == largest);
            let Some(&(token, _)) = best else { break };
            tokens.push(token);
            left.retain(|&place| self.get(place).token == token);
            left.iter_mut().for_each(|place| *place += 1);
            left.retain(|&place| self.is_within_text(place));
        }
        let support = if tokens.is_empty() { 0 } else { places.support };
        Guess { tokens, support }
    }

    /// How many tokens before `first` are those at the end of `rest`, within the text.
    fn same_before(&self, first: u64, rest: &[u32]) -> usize {
        let known = (first - self.base) as usize;
        let most = self.get(first).offset.min(known).min(LONGEST - GRAM);
        let mut count = 0;
        while count < most.min(rest.len())
            && self.get(first - 1 - count as u64).token == rest[rest.len() - 1 - count]
        {
            count += 1;
        }
        count
    }

    /// Whether there is a token at a place, and it does not begin another text.
    fn is_within_text(&self, place: u64) -> bool {
        place < self.total() && self.get(place).offset > 0
    }

    fn total(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    fn get(&self, place: u64) -> &Entry {
        &self.entries[(place - self.base) as usize]
    }

    fn entry(&mut self, place: u64) -> &mut Entry {
        &mut self.entries[(place - self.base) as usize]
    }

    fn gram(&self, first: u64) -> [u32; GRAM] {
        std::array::from_fn(|at| self.get(first + at as u64).token)
    }

    /// Forgets the first token, with the gram that begins there if it stood nowhere later.
    fn forget_first(&mut self) {
        let Some(&(start, namespace)) = self.starts.front() else {
            return;
        };
        let next = self.starts.get(1).map_or(self.total(), |&(next, _)| next);
        if self.base + GRAM as u64 <= next {
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
                    self.gone.push(namespace);
                }
            }
        }
    }
}
