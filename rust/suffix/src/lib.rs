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
use std::sync::Arc;

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
    /// The ids of namespaces, and what is known of each.
    ids: HashMap<Arc<[u8]>, u64>,
    namespaces: HashMap<u64, Namespace>,
    texts: HashMap<u64, Text>,
    next: u64,
}

/// A namespace is known as long as a text of it grows or the archive holds one.
struct Namespace {
    name: Arc<[u8]>,
    growing: usize,
}

impl Suffixes {
    /// An archive of at most so many tokens, one at least.
    pub fn new(max_tokens: usize) -> Self {
        Suffixes {
            archive: Log::new(max_tokens.max(1)),
            ids: HashMap::new(),
            namespaces: HashMap::new(),
            texts: HashMap::new(),
            next: 0,
        }
    }

    /// A text of this namespace that begins with a prompt; what it is called.
    pub fn begin(&mut self, namespace: &[u8], prompt: &[u32]) -> u64 {
        let id = self.next;
        self.next += 1;
        let namespace = self.hold(namespace, id);
        let mut log = Log::new(usize::MAX);
        log.begin(namespace);
        log.extend(prompt);
        let text = Text {
            namespace,
            num_prompt: prompt.len(),
            log,
        };
        self.texts.insert(id, text);
        id
    }

    /// One growing text more in a namespace; the id of that, which is `new_id` if it was not known.
    fn hold(&mut self, name: &[u8], new_id: u64) -> u64 {
        let id = match self.ids.get(name) {
            Some(&id) => id,
            None => {
                let name: Arc<[u8]> = name.into();
                self.ids.insert(Arc::clone(&name), new_id);
                self.namespaces
                    .insert(new_id, Namespace { name, growing: 0 });
                new_id
            }
        };
        let known = self.namespaces.get_mut(&id);
        known.expect("it has an id").growing += 1;
        id
    }

    /// Forgets a namespace in which nothing grows and of which the archive holds nothing.
    fn forget_unused(&mut self, id: u64) {
        let known = self.namespaces.get(&id);
        let Some(known) = known.filter(|known| known.growing == 0 && !self.archive.holds(id))
        else {
            return;
        };
        self.ids.remove(&known.name);
        self.namespaces.remove(&id);
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
        if let Some(known) = self.namespaces.get_mut(&text.namespace) {
            known.growing -= 1;
        }
        self.forget_unused(text.namespace);
        for namespace in self.archive.take_gone() {
            self.forget_unused(namespace);
        }
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
