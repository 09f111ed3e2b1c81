//! Guesses against a search of everything, with an archive that forgets.

use std::time::Instant;

use proptest::prelude::*;
use suffix::{GRAM, Guess, LONGEST, MOST_PLACES, Suffixes};

#[derive(Clone, Debug)]
enum Call {
    Begin(u8, Vec<u32>),
    Extend(usize, Vec<u32>),
    End(usize),
    Guess(usize, usize),
}

fn call() -> impl Strategy<Value = Call> {
    let tokens = |most| prop::collection::vec(0..3_u32, 0..most);
    prop_oneof![
        2 => (0..2_u8, tokens(20)).prop_map(|(namespace, prompt)| Call::Begin(namespace, prompt)),
        4 => (0..8_usize, tokens(12)).prop_map(|(text, tokens)| Call::Extend(text, tokens)),
        1 => (0..8_usize).prop_map(Call::End),
        4 => (0..8_usize, 0..6_usize).prop_map(|(text, most)| Call::Guess(text, most)),
    ]
}

#[derive(Clone)]
struct Text {
    namespace: u8,
    num_prompt: usize,
    tokens: Vec<u32>,
}

/// All that is known, in lists.
struct Oracle {
    capacity: usize,
    archive: Vec<(u8, Vec<u32>)>,
    texts: Vec<(u64, Text)>,
}

impl Oracle {
    fn end(&mut self, at: usize) -> u64 {
        let (name, text) = self.texts.remove(at);
        if text.tokens.len() > text.num_prompt {
            let kept = text.tokens[text.num_prompt.saturating_sub(GRAM)..].to_vec();
            self.archive.push((text.namespace, kept));
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

    fn guess(&self, at: usize, most: usize) -> Guess {
        let text = &self.texts[at].1;
        let own = vec![text.tokens.clone()];
        let same = |(namespace, _): &&(u8, Vec<u32>)| *namespace == text.namespace;
        let others: Vec<_> = self
            .archive
            .iter()
            .filter(same)
            .map(|(_, one)| one.clone())
            .collect();
        let (own, others) = (behind(&own, &text.tokens), behind(&others, &text.tokens));
        let (support, mut left) = if own.0 >= others.0 { own } else { others };
        let mut tokens = Vec::new();
        while tokens.len() < most && !left.is_empty() {
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
        let support = if tokens.is_empty() { 0 } else { support };
        Guess { tokens, support }
    }
}

/// How much of the end stands elsewhere at most, and what follows there, the latest first.
fn behind(texts: &[Vec<u32>], end: &[u32]) -> (usize, Vec<Vec<u32>>) {
    let same = |before: &[u32]| {
        let pairs = before.iter().rev().zip(end.iter().rev());
        pairs
            .take_while(|(one, other)| one == other)
            .count()
            .min(LONGEST)
    };
    let places = texts.iter().rev().flat_map(|text| {
        (GRAM..=text.len())
            .rev()
            .map(move |at| (&text[..at], &text[at..]))
    });
    let found: Vec<_> = places
        .map(|(before, after)| (same(before), after.to_vec()))
        .filter(|(support, _)| *support >= GRAM)
        .take(MOST_PLACES)
        .filter(|(_, after)| !after.is_empty())
        .collect();
    let support = found.iter().map(|(support, _)| *support).max().unwrap_or(0);
    let longest = found.into_iter().filter(|(one, _)| *one == support);
    (support, longest.map(|(_, after)| after).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn guesses_are_those_of_a_search(
        capacity in 1..120_usize,
        calls in prop::collection::vec(call(), 1..120),
    ) {
        let mut suffixes = Suffixes::new(capacity);
        let mut oracle = Oracle { capacity, archive: Vec::new(), texts: Vec::new() };
        for call in calls {
            let count = oracle.texts.len();
            match call {
                Call::Begin(namespace, tokens) => {
                    let name = suffixes.begin(&[namespace], &tokens);
                    let num_prompt = tokens.len();
                    oracle.texts.push((name, Text { namespace, num_prompt, tokens }));
                }
                Call::Extend(at, tokens) if at < count => {
                    prop_assert!(suffixes.extend(oracle.texts[at].0, &tokens));
                    oracle.texts[at].1.tokens.extend(tokens);
                }
                Call::End(at) if at < count => {
                    let name = oracle.end(at);
                    suffixes.end(name);
                    prop_assert!(!suffixes.extend(name, &[1]));
                    prop_assert_eq!(suffixes.guess(name, 3), Guess::default());
                }
                Call::Guess(at, most) if at < count => {
                    let name = oracle.texts[at].0;
                    prop_assert_eq!(suffixes.guess(name, most), oracle.guess(at, most));
                }
                _ => {}
            }
            prop_assert_eq!(suffixes.num_archived(), oracle.archived());
        }
        for at in (0..oracle.texts.len()).rev() {
            let name = oracle.end(at);
            suffixes.end(name);
        }
        let mut known: Vec<_> = oracle.archive.iter().map(|(namespace, _)| *namespace).collect();
        known.sort_unstable();
        known.dedup();
        prop_assert_eq!(suffixes.num_known(), (0, known.len()));
    }
}

#[test]
fn another_namespace_is_never_seen() {
    let mut suffixes = Suffixes::new(1000);
    let one = suffixes.begin(b"one", &[1, 2, 3]);
    suffixes.extend(one, &[4, 5, 6, 7]);
    suffixes.end(one);
    let other = suffixes.begin(b"other", &[1, 2, 3]);
    assert_eq!(suffixes.guess(other, 4), Guess::default());
    let same = suffixes.begin(b"one", &[1, 2, 3]);
    let expected = Guess {
        tokens: vec![4, 5, 6],
        support: 3,
    };
    assert_eq!(suffixes.guess(same, 3), expected);
}

#[test]
fn an_archive_of_nothing_stays_small() {
    let mut suffixes = Suffixes::new(0);
    for _ in 0..3 {
        let text = suffixes.begin(b"", &[1, 2, 3]);
        suffixes.extend(text, &[4, 5, 6, 7]);
        suffixes.end(text);
        assert_eq!(suffixes.num_archived(), 1);
    }
}

/// A text that ends costs the same however many namespaces are known.
#[test]
fn ending_a_text_does_not_look_at_all_namespaces() {
    let ends = |namespaces: u32| {
        let mut known = Suffixes::new(1 << 30);
        for name in 0..namespaces {
            let text = known.begin(&name.to_le_bytes(), &[1, 2, 3, 4]);
            known.extend(text, &[5]);
            known.end(text);
        }
        assert_eq!(known.num_known(), (0, namespaces as usize));
        let texts: Vec<u64> = (0..200).map(|_| known.begin(b"other", &[1])).collect();
        let start = Instant::now();
        texts.into_iter().for_each(|text| known.end(text));
        assert_eq!(known.num_known(), (0, namespaces as usize));
        start.elapsed()
    };
    let least = |namespaces| (0..3).map(|_| ends(namespaces)).min();
    let (few, many) = (least(100).expect("one"), least(20_000).expect("one"));
    assert!(
        many < 50 * few,
        "{few:?} beside 100 namespaces, {many:?} beside 20,000"
    );
}
