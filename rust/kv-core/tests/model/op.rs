//! Operations on a manager, as numbers from any source.

use kv_core::{Namespace, PrefillRequest};

/// Where a sequence leaves its namespace, and for which name.
pub(crate) type Switch = Option<(usize, u8)>;

#[derive(Clone, Debug)]
pub(crate) enum Op {
    New {
        namespace: u8,
        switch: Switch,
        pattern: u8,
        len: usize,
        read_cache: bool,
    },
    Drop(usize),
    /// Frees a sequence; so many of its tokens may stay cached.
    Free(usize, Option<usize>),
    Reset(usize),
    Match {
        namespace: u8,
        switch: Switch,
        pattern: u8,
        len: usize,
    },
    Pin(usize),
    Attach(usize, usize),
    Fork(usize, usize),
    Append(usize, u8),
    DropPin(usize),
    Begin(usize),
    Prefill(usize, PrefillRequest),
    Decode(u8, usize),
    Speculate(usize, usize),
    Draft(u8, usize),
    Trim(usize, usize),
    Cancel(usize),
    Commit(u8),
    /// Steps that decode whoever can: as a rule the same ones.
    Decoding(u8),
    WrongCommit,
    Rollback,
    DropPlan(bool),
    Launch,
    EvictAll,
    Reuse(usize),
    Extend(usize, usize),
    Publish(usize, u8),
    Reserve(usize, usize),
    /// How many of the blocks have arrived, if it is not how it is lost.
    Complete(usize, u8),
    DropTransfer(usize),
    Abandon(usize),
    Evict(usize),
    /// Snapshots of a sequence at two positions.
    Want(usize, usize, usize),
    Keep(usize),
    /// The weights change.
    Advance,
}

/// A bound that means any index of a list that is short.
const ANY: usize = 256;

impl Op {
    /// An operation made of at most eight numbers; `below` gives one below its argument.
    pub(crate) fn choose(below: &mut impl FnMut(usize) -> usize) -> Self {
        match below(240) {
            0..8 => Self::New {
                namespace: below(2) as u8,
                switch: choose_switch(below(48)),
                pattern: below(4) as u8,
                len: choose_len(below),
                read_cache: below(5) > 0,
            },
            8..10 => Self::Drop(below(ANY)),
            10..12 => Self::Free(below(ANY), below(40).checked_sub(20)),
            12 => Self::Reset(below(ANY)),
            13..15 => Self::Match {
                namespace: below(2) as u8,
                switch: choose_switch(below(48)),
                pattern: below(4) as u8,
                len: choose_len(below),
            },
            15..18 => Self::Pin(below(ANY)),
            18..21 => Self::Attach(below(ANY), below(ANY)),
            21..30 => Self::Fork(below(ANY), below(4 * ANY)),
            30..33 => Self::Append(below(ANY), below(256) as u8),
            33..36 => Self::DropPin(below(ANY)),
            36..46 => Self::Begin(often(64, 6, 9, below)),
            46..86 => Self::Prefill(
                below(ANY),
                PrefillRequest {
                    max_tokens: often(64, 6, 6, below),
                    spare_blocks: below(12).checked_sub(8),
                    replay: often(0, 8, 9, below),
                },
            ),
            86..110 => Self::Decode(below(256) as u8, often(0, 7, 6, below)),
            110..126 => Self::Speculate(below(ANY), below(5)),
            126..136 => Self::Draft(below(256) as u8, below(5)),
            136..139 => Self::Trim(below(ANY), below(6)),
            139..142 => Self::Cancel(below(ANY)),
            142..154 => Self::Commit(below(256) as u8),
            154..156 => Self::Decoding(below(256) as u8),
            156 => Self::WrongCommit,
            157 => Self::Rollback,
            158 => Self::DropPlan(below(2) == 1),
            159..162 => Self::Launch,
            162 => Self::EvictAll,
            163..169 => Self::Reuse(below(ANY)),
            169..183 => Self::Extend(below(ANY), below(12)),
            183..203 => Self::Publish(below(ANY), below(256) as u8),
            203..217 => Self::Reserve(below(ANY), below(4 * ANY)),
            217..226 => Self::Complete(below(ANY), below(256) as u8),
            226 => Self::DropTransfer(below(ANY)),
            227 => Self::Abandon(below(ANY)),
            228..230 => Self::Evict(below(6)),
            230..233 => Self::Want(below(ANY), below(60), below(12)),
            233..238 => Self::Keep(below(ANY)),
            _ => Self::Advance,
        }
    }
}

/// Half of the prompts leave their namespace, at one of few positions.
pub(crate) fn choose_switch(number: usize) -> Switch {
    let number = number.checked_sub(24)?;
    Some((number / 2, 1 + (number % 2) as u8))
}

/// A length of a prompt: mostly of a few blocks.
fn choose_len(below: &mut impl FnMut(usize) -> usize) -> usize {
    match below(10) {
        0 => 14 + below(56),
        _ => 1 + below(13),
    }
}

/// `usual` in `times` of 10 cases, else a number below `bound`.
fn often(
    usual: usize,
    times: usize,
    bound: usize,
    below: &mut impl FnMut(usize) -> usize,
) -> usize {
    match below(10) {
        number if number < times => usual,
        _ => below(bound),
    }
}

/// A token of a sequence with this switch: the first one of the other namespace is marked, so that prefixes are equal if
/// their tokens and their switches are. Tokens are below 256, and marked ones below 65,536.
pub(crate) fn marked(switch: Switch, position: usize, token: u32) -> u32 {
    match switch {
        Some((at, name)) if at == position => token | u32::from(name) << 8,
        _ => token,
    }
}

/// The tokens without marks.
pub(crate) fn raw(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().map(|token| token & 0xff).collect()
}

/// The switch that the marks show.
pub(crate) fn switch_in(tokens: &[u32]) -> Switch {
    let at = tokens.iter().position(|&token| token & 0xff00 > 0)?;
    Some((at, (tokens[at] >> 8) as u8))
}

/// the namespace of a prompt, as the manager gets it.
pub(crate) fn namespace(name: u8, switch: Switch) -> Namespace<'static> {
    let bytes = |name: u8| &[0_u8, 1, 2, 3][usize::from(name)..][..1];
    Namespace {
        name: bytes(name),
        switch: switch.map(|(at, to)| (at, bytes(to))),
    }
}

/// Few patterns with common prefixes, so that cached blocks are shared.
pub(crate) fn tokens(pattern: u8, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|at| {
            if at < 2 + u32::from(pattern) {
                at % 3
            } else {
                u32::from(pattern)
            }
        })
        .collect()
}
