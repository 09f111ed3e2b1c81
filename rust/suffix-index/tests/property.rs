//! Drafts against an exhaustive search, with an archive that forgets.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use suffix_index::{Draft, MAX_MATCH, MAX_MATCHES, MIN_MATCH, SuffixIndex};

#[derive(Clone, Debug)]
enum Call {
    Begin(u8, Vec<u32>),
    Extend(usize, Vec<u32>),
    End(usize),
    Draft(usize, usize),
}

fn call() -> impl Strategy<Value = Call> {
    let tokens = |max_tokens| prop::collection::vec(0..3_u32, 0..max_tokens);
    prop_oneof![
        2 => (0..2_u8, tokens(20)).prop_map(|(namespace, prompt)| Call::Begin(namespace, prompt)),
        4 => (0..8_usize, tokens(12)).prop_map(|(sequence, tokens)| Call::Extend(sequence, tokens)),
        1 => (0..8_usize).prop_map(Call::End),
        4 => (0..8_usize, 0..6_usize).prop_map(|(sequence, max_tokens)| Call::Draft(sequence, max_tokens)),
    ]
}

#[derive(Clone)]
struct Sequence {
    namespace: u8,
    num_prompt: usize,
    tokens: Vec<u32>,
}

/// The whole index as lists.
struct Oracle {
    capacity: usize,
    archive: Vec<(u8, Vec<u32>)>,
    sequences: Vec<(u64, Sequence)>,
}

impl Oracle {
    fn end(&mut self, at: usize) -> u64 {
        let (name, sequence) = self.sequences.remove(at);
        if sequence.tokens.len() > sequence.num_prompt {
            let kept = sequence.tokens[sequence.num_prompt.saturating_sub(MIN_MATCH)..].to_vec();
            self.archive.push((sequence.namespace, kept));
        }
        while self.archived() > self.capacity {
            self.archive[0].1.remove(0);
            if self.archive[0].1.is_empty() {
                self.archive.remove(0);
            }
        }
        name
    }

    fn archived(&self) -> usize {
        self.archive.iter().map(|(_, tokens)| tokens.len()).sum()
    }

    fn draft(&self, at: usize, max_tokens: usize) -> Draft {
        let sequence = &self.sequences[at].1;
        let own = vec![sequence.tokens.clone()];
        let same = |(namespace, _): &&(u8, Vec<u32>)| *namespace == sequence.namespace;
        let others: Vec<_> = self
            .archive
            .iter()
            .filter(same)
            .map(|(_, tokens)| tokens.clone())
            .collect();
        let (own, others) = (
            matches(&own, &sequence.tokens),
            matches(&others, &sequence.tokens),
        );
        let (match_len, mut left) = if own.0 >= others.0 { own } else { others };
        let mut tokens = Vec::new();
        while tokens.len() < max_tokens && !left.is_empty() {
            let count = |token: u32| left.iter().filter(|rest| rest[0] == token).count();
            let best = left.iter().map(|rest| count(rest[0])).max().expect("some");
            let token = left
                .iter()
                .find(|rest| count(rest[0]) == best)
                .expect("some")[0];
            tokens.push(token);
            left = left
                .into_iter()
                .filter(|rest| rest[0] == token && rest.len() > 1)
                .map(|rest| rest[1..].to_vec())
                .collect();
        }
        let match_len = if tokens.is_empty() { 0 } else { match_len };
        Draft { tokens, match_len }
    }
}

/// The length of the longest suffix that occurs, and what follows its occurrences, latest first.
fn matches(sequences: &[Vec<u32>], end: &[u32]) -> (usize, Vec<Vec<u32>>) {
    let same = |before: &[u32]| {
        let pairs = before.iter().rev().zip(end.iter().rev());
        pairs
            .take_while(|(left, right)| left == right)
            .count()
            .min(MAX_MATCH)
    };
    let matches = sequences.iter().rev().flat_map(|sequence| {
        (MIN_MATCH..=sequence.len())
            .rev()
            .map(move |at| (&sequence[..at], &sequence[at..]))
    });
    let lens: Vec<_> = matches
        .map(|(before, after)| (same(before), after.to_vec()))
        .filter(|(match_len, _)| *match_len >= MIN_MATCH)
        .take(MAX_MATCHES)
        .filter(|(_, after)| !after.is_empty())
        .collect();
    let longest = lens.iter().map(|(len, _)| *len).max().unwrap_or(0);
    let followers = lens.into_iter().filter(|(len, _)| *len == longest);
    (longest, followers.map(|(_, after)| after).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn drafts_are_those_of_a_search(
        capacity in 1..120_usize,
        calls in prop::collection::vec(call(), 1..120),
    ) {
        let mut index = SuffixIndex::new(capacity);
        let mut oracle = Oracle { capacity, archive: Vec::new(), sequences: Vec::new() };
        for call in calls {
            let count = oracle.sequences.len();
            match call {
                Call::Begin(namespace, tokens) => {
                    let name = index.start(&[namespace], &tokens);
                    let num_prompt = tokens.len();
                    oracle.sequences.push((name, Sequence { namespace, num_prompt, tokens }));
                }
                Call::Extend(at, tokens) if at < count => {
                    prop_assert!(index.extend(oracle.sequences[at].0, &tokens));
                    oracle.sequences[at].1.tokens.extend(tokens);
                }
                Call::End(at) if at < count => {
                    let name = oracle.end(at);
                    index.finish(name);
                    prop_assert!(!index.extend(name, &[1]));
                    prop_assert_eq!(index.draft(name, 3), Draft::default());
                }
                Call::Draft(at, max_tokens) if at < count => {
                    let name = oracle.sequences[at].0;
                    prop_assert_eq!(index.draft(name, max_tokens), oracle.draft(at, max_tokens));
                }
                _ => {}
            }
            prop_assert_eq!(index.num_archived(), oracle.archived());
        }
        for at in (0..oracle.sequences.len()).rev() {
            let name = oracle.end(at);
            index.finish(name);
        }
        let mut known: Vec<_> = oracle.archive.iter().map(|(namespace, _)| *namespace).collect();
        known.sort_unstable();
        known.dedup();
        prop_assert_eq!((index.num_sequences(), index.num_namespaces()), (0, known.len()));
    }
}

#[test]
fn drafts_are_of_the_same_namespace() {
    let mut index = SuffixIndex::new(1000);
    let first = index.start(b"one", &[1, 2, 3]);
    index.extend(first, &[4, 5, 6, 7]);
    index.finish(first);
    let other = index.start(b"other", &[1, 2, 3]);
    assert_eq!(index.draft(other, 4), Draft::default());
    let same = index.start(b"one", &[1, 2, 3]);
    let expected = Draft {
        tokens: vec![4, 5, 6],
        match_len: 3,
    };
    assert_eq!(index.draft(same, 3), expected);
}

#[test]
fn an_archive_of_nothing_stays_small() {
    let mut index = SuffixIndex::new(0);
    for _ in 0..3 {
        let sequence = index.start(b"", &[1, 2, 3]);
        index.extend(sequence, &[4, 5, 6, 7]);
        index.finish(sequence);
        assert_eq!(index.num_archived(), 1);
    }
}

/// A sequence that ends costs the same however many namespaces are known.
#[test]
fn ending_a_text_does_not_look_at_all_namespaces() {
    let ends = |namespaces: u32| {
        let mut known = SuffixIndex::new(1 << 30);
        for name in 0..namespaces {
            let sequence = known.start(&name.to_le_bytes(), &[1, 2, 3, 4]);
            known.extend(sequence, &[5]);
            known.finish(sequence);
        }
        assert_eq!(
            (known.num_sequences(), known.num_namespaces()),
            (0, namespaces as usize)
        );
        let sequences: Vec<u64> = (0..200).map(|_| known.start(b"other", &[1])).collect();
        let start = Instant::now();
        sequences
            .into_iter()
            .for_each(|sequence| known.finish(sequence));
        assert_eq!(
            (known.num_sequences(), known.num_namespaces()),
            (0, namespaces as usize)
        );
        start.elapsed()
    };
    let (mut few, mut many) = (Duration::MAX, Duration::MAX);
    // The fastest of three tries, or of up to 20 while other load slows the machine.
    for tries in 1..=20 {
        (few, many) = (few.min(ends(100)), many.min(ends(20_000)));
        if tries >= 3 && many < 50 * few {
            return;
        }
    }
    panic!("{few:?} beside 100 namespaces, {many:?} beside 20,000");
}
