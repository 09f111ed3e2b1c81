//! A namespace that switches to another one at a position: an adapter that counts from its invocation on.
//!
//! Blocks that end at or before the position are those of the namespace. The block that contains it has a label, in
//! which it differs from blocks with the same parent and tokens. Blocks after it follow it in the radix tree, and so
//! differ, too.

use std::sync::Arc;

use crate::error::Error;

/// The position of a switch, and the name from there on.
pub type SwitchPoint = (usize, Arc<[u8]>);

/// A namespace, and where a prompt leaves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespace<'a> {
    /// Blocks of the same tokens are shared within it, and with no other one.
    pub name: &'a [u8],
    /// From this position on, blocks are shared only between prompts with the same position and the same name here.
    pub switch: Option<(usize, &'a [u8])>,
}

impl<'a> Namespace<'a> {
    /// The namespace `name`, which is left at `position` for `other`.
    pub fn switching(name: &'a [u8], position: usize, other: &'a [u8]) -> Self {
        Self {
            name,
            switch: Some((position, other)),
        }
    }

    /// Its switch in blocks of `block_size` tokens.
    ///
    /// # Errors
    /// [`Error::Namespace`], [`Error::EmptySwitch`], [`Error::SwitchPosition`]
    pub(crate) fn check(&self, block_size: usize) -> Result<Option<Switch>, Error> {
        check_name(self.name)?;
        let Some((position, name)) = self.switch else {
            return Ok(None);
        };
        check_name(name)?;
        if name.is_empty() {
            return Err(Error::EmptySwitch { position });
        }
        if u32::try_from(position).is_err() {
            return Err(Error::SwitchPosition { position });
        }
        Ok(Some(Switch {
            index: position / block_size,
            label: Label {
                offset: (position % block_size) as u32,
                name: name.into(),
            },
        }))
    }
}

impl<'a> From<&'a [u8]> for Namespace<'a> {
    fn from(name: &'a [u8]) -> Self {
        Self { name, switch: None }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Namespace<'a> {
    fn from(name: &'a [u8; N]) -> Self {
        Self::from(&name[..])
    }
}

impl<'a> From<&'a Vec<u8>> for Namespace<'a> {
    fn from(name: &'a Vec<u8>) -> Self {
        Self::from(&name[..])
    }
}

/// Bytes of a name.
const LONGEST_NAME: usize = 65_536;

fn check_name(name: &[u8]) -> Result<(), Error> {
    match name.len() {
        ..=LONGEST_NAME => Ok(()),
        bytes => Err(Error::Namespace { bytes }),
    }
}

/// The label of a block in which a namespace switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    /// The first token in the block that belongs to the other namespace.
    pub(crate) offset: u32,
    /// The other namespace.
    pub(crate) name: Arc<[u8]>,
}

impl Label {
    /// The leading tokens whose KV two blocks of the same parent and tokens have in common.
    pub(crate) fn common(one: Option<&Self>, other: Option<&Self>) -> usize {
        let offset = |label: Option<&Self>| label.map_or(usize::MAX, |label| label.offset as usize);
        match one == other {
            true => usize::MAX,
            false => offset(one).min(offset(other)),
        }
    }
}

/// The logical block in which the namespace of a sequence switches, and its label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Switch {
    pub(crate) index: usize,
    pub(crate) label: Label,
}

/// Tokens from the beginning of a prompt, and the switch of their namespace.
#[derive(Clone, Copy)]
pub(crate) struct Labelled<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) switch: Option<&'a Switch>,
}

impl<'a> Labelled<'a> {
    pub(crate) fn new(tokens: &'a [u32], switch: &'a Option<Switch>) -> Self {
        Self {
            tokens,
            switch: switch.as_ref(),
        }
    }

    /// The label of a logical block.
    #[inline]
    pub(crate) fn label(self, index: usize) -> Option<&'a Label> {
        let switch = self.switch.filter(|switch| switch.index == index);
        switch.map(|switch| &switch.label)
    }

    /// Its first `count` tokens.
    pub(crate) fn first(self, count: usize) -> Self {
        Self {
            tokens: &self.tokens[..count],
            ..self
        }
    }

    /// The switch, if it is before the end of the first `indices` logical blocks.
    pub(crate) fn switch_before(self, indices: usize) -> Option<&'a Switch> {
        self.switch.filter(|switch| switch.index < indices)
    }
}
