//! What came after the end of a text where that stood before: in the text itself, and in earlier ones
//! of the same namespace.
//!
//! Texts grow token by token and end. What of an ended one is kept goes into an archive of bounded size,
//! from which the oldest tokens are forgotten. A guess follows the places where the longest part of the
//! text's end stands: token by token it takes what most of them go on with.
//!
//! As in LZ77 (Ziv and Lempel, 1977), places are found by chains: for [`GRAM`] tokens the place where they
//! stood last, and from each place the one before. At most [`MOST_PLACES`] are looked at, so a guess takes
//! the same time however much is known.
#![forbid(unsafe_code)]

mod log;

use std::collections::HashMap;

use log::Log;

/// Tokens that have to be the same, at least.
pub const GRAM: usize = 3;
/// Tokens that are compared, at most.
pub const LONGEST: usize = 32;
/// Places that are looked at, the latest ones, in a text and in the archive each.
pub const MOST_PLACES: usize = 64;

/// Tokens that may come next, and how many before them are the same where they did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guess {
    /// In order.
    pub tokens: Vec<u32>,
    /// From [`GRAM`] to [`LONGEST`]; 0 where there is no guess.
    pub support: usize,
}

struct Text {
    namespace: u64,
    num_prompt: usize,
    log: Log,
}

/// Texts that grow, and an archive of those that have ended.
pub struct Suffixes {
    archive: Log,
    namespaces: HashMap<Vec<u8>, Namespace>,
    texts: HashMap<u64, Text>,
    next: u64,
}

/// A namespace is known as long as a text of it grows or the archive holds one.
struct Namespace {
    id: u64,
    growing: usize,
}

impl Suffixes {
    /// An archive of at most so many tokens, one at least.
    pub fn new(max_tokens: usize) -> Self {
        Suffixes {
            archive: Log::new(max_tokens.max(1)),
            namespaces: HashMap::new(),
            texts: HashMap::new(),
            next: 0,
        }
    }

    /// A text of this namespace that begins with a prompt; what it is called.
    pub fn begin(&mut self, namespace: &[u8], prompt: &[u32]) -> u64 {
        let id = self.next;
        self.next += 1;
        let known = self.namespaces.entry(namespace.to_vec());
        let known = known.or_insert(Namespace { id, growing: 0 });
        known.growing += 1;
        let mut log = Log::new(usize::MAX);
        log.begin(known.id);
        log.extend(prompt);
        let text = Text {
            namespace: known.id,
            num_prompt: prompt.len(),
            log,
        };
        self.texts.insert(id, text);
        id
    }

    /// The text goes on; false if there is none of this name.
    pub fn extend(&mut self, text: u64, tokens: &[u32]) -> bool {
        let found = self.texts.get_mut(&text);
        found.map(|text| text.log.extend(tokens)).is_some()
    }

    /// The text has ended: what came after its prompt goes into the archive, with the [`GRAM`] tokens
    /// before it. Nothing if there is none of this name.
    pub fn end(&mut self, text: u64) {
        let Some(text) = self.texts.remove(&text) else {
            return;
        };
        let tokens = text.log.tokens();
        if tokens.len() > text.num_prompt {
            self.archive.begin(text.namespace);
            self.archive
                .extend(&tokens[text.num_prompt.saturating_sub(GRAM)..]);
        }
        let archive = &self.archive;
        self.namespaces.retain(|_, known| {
            known.growing -= usize::from(known.id == text.namespace);
            known.growing > 0 || archive.holds(known.id)
        });
    }

    /// At most `most` tokens that may come next; none if there is no text of this name.
    pub fn guess(&self, text: u64, most: usize) -> Guess {
        let Some(text) = self.texts.get(&text) else {
            return Guess::default();
        };
        let end = text.log.end(LONGEST);
        let own = text.log.places(text.namespace, &end);
        let others = self.archive.places(text.namespace, &end);
        match own.support >= others.support {
            true => text.log.follow(own, most),
            false => self.archive.follow(others, most),
        }
    }

    /// Tokens in the archive.
    pub fn num_archived(&self) -> usize {
        self.archive.len()
    }

    /// Texts that grow, and namespaces that are known.
    pub fn num_known(&self) -> (usize, usize) {
        (self.texts.len(), self.namespaces.len())
    }
}
