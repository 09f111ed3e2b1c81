//! The states of recurrent layers: which of them the sequences of a step read and write, and their division among tasks.
//!
//! A layer's states are an array `[num_slots, ...]` of float32. A sequence begins with the state of one slot, or with
//! zeros, and leaves its state after its new tokens in a slot, the same one or another, or nowhere.

use std::ops::Range;

use crate::attention::Attention;
use crate::divided::{Part, divided};
use crate::error::Error;
use crate::step::{CacheShape, same_length};

/// Numbers of states that change below which no other thread is woken.
const SMALL: usize = 20_000;

impl Attention {
    /// Runs the tasks of a recurrence, in which `work` numbers of states change.
    pub(crate) fn advance<T: Send>(&self, work: usize, tasks: Vec<T>, run: impl Fn(T) + Sync) {
        let num_threads = match work > SMALL {
            true => self.threads().count().min(tasks.len()),
            false => 1,
        };
        self.threads().share_out(num_threads, tasks, run);
    }
}

/// The sequences of a step, for layers with states.
#[derive(Clone, Debug)]
pub struct StateStep {
    /// The rows of each sequence.
    rows: Vec<Range<usize>>,
    sources: Vec<Option<usize>>,
    slots: Vec<Option<usize>>,
    /// Slots that are read or written, in ascending order.
    used: Vec<usize>,
}

/// The state of a sequence before its new tokens.
enum Initial<'a> {
    Zeros,
    /// That of the slot that is written.
    InPlace,
    Of(Vec<&'a [f32]>),
}

/// Some columns of a sequence's state.
pub(crate) struct StatePart<'a> {
    initial: Initial<'a>,
    target: Option<Vec<&'a mut [f32]>>,
    /// Rows of a slot, and columns of the part.
    size: (usize, usize),
}

/// The shape of a layer's states.
#[derive(Clone, Copy)]
pub(crate) struct StateShape {
    /// Rows of a slot.
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// Columns of a task.
    pub(crate) columns: usize,
}

impl StateStep {
    /// `starts` `[num_sequences + 1]`: the first row of each sequence, and the number of rows. `sources`
    /// `[num_sequences]`: the slot of each initial state, -1: zeros. `slots`: where each final state goes, -1: nowhere.
    ///
    /// # Errors
    ///
    /// Starts that do not begin with 0 or that decrease, a slot below -1, and a slot that one sequence writes and
    /// another one reads or writes.
    pub fn new(starts: &[i32], sources: &[i64], slots: &[i64]) -> Result<Self, Error> {
        same_length("query_start_loc", slots.len() + 1, starts.len())?;
        same_length("sources", slots.len(), sources.len())?;
        let first = std::iter::once((0, &starts[0])).filter(|(_, start)| **start != 0);
        let decreases = (1..).zip(starts.windows(2).filter_map(|pair| pair.get(1)));
        let decreases = decreases.filter(|&(at, start)| *start < starts[at - 1]);
        if let Some((at, &value)) = first.chain(decreases).next() {
            return Err(Error::Starts { at, value });
        }
        let mut step = Self {
            rows: Vec::with_capacity(slots.len()),
            sources: optional("sources", sources)?,
            slots: optional("slots", slots)?,
            used: vec![],
        };
        for bounds in starts.windows(2) {
            step.rows.push(bounds[0] as usize..bounds[1] as usize);
        }
        step.check_sharing()?;
        step.used = step
            .sources
            .iter()
            .chain(&step.slots)
            .flatten()
            .copied()
            .collect();
        step.used.sort_unstable();
        step.used.dedup();
        Ok(step)
    }

    /// Refuses slots that one sequence writes and another one uses: the order of sequences is not defined.
    fn check_sharing(&self) -> Result<(), Error> {
        let mut uses: Vec<(usize, bool, usize)> = vec![];
        for (sequence, (&source, &slot)) in self.sources.iter().zip(&self.slots).enumerate() {
            uses.extend(slot.map(|slot| (slot, true, sequence)));
            uses.extend(
                source
                    .filter(|_| source != slot)
                    .map(|slot| (slot, false, sequence)),
            );
        }
        uses.sort_unstable();
        let conflict = uses.windows(2).find(|pair| {
            let [(slot, first_writes, _), (other, second_writes, _)] = [pair[0], pair[1]];
            slot == other && (first_writes || second_writes)
        });
        match conflict {
            None => Ok(()),
            Some(pair) => Err(Error::SharedState {
                slot: pair[0].0,
                sequences: (pair[0].2, pair[1].2),
            }),
        }
    }

    /// Rows of all sequences.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.rows.last().map_or(0, |rows| rows.end)
    }

    /// Checks that an array of states has the used slots.
    pub(crate) fn check(&self, states: usize, shape: StateShape) -> Result<(), Error> {
        let size = CacheShape::elements(1, shape.rows, shape.width)?;
        let num_slots = states / size.max(1);
        same_length("the states", num_slots * size, states)?;
        for (name, slots) in [("sources", &self.sources), ("slots", &self.slots)] {
            for (at, slot) in slots.iter().enumerate() {
                if let Some(slot) = slot.filter(|&slot| slot >= num_slots) {
                    return Err(Error::StateSlot {
                        name,
                        at,
                        value: slot as i64,
                        num_slots: Some(num_slots),
                    });
                }
            }
        }
        Ok(())
    }

    /// The columns of each sequence's state, those of the first sequence first. The states have been checked.
    pub(crate) fn divide<'a>(
        &self,
        states: &'a mut [f32],
        shape: StateShape,
    ) -> Vec<StatePart<'a>> {
        let StateShape {
            rows,
            width,
            columns,
        } = shape;
        let ranges: Vec<Range<usize>> = self
            .used
            .iter()
            .map(|slot| slot * rows..(slot + 1) * rows)
            .collect();
        let mut parts: Vec<Used<'a>> = divided(states, width, columns, &ranges)
            .into_iter()
            .map(|part| Used::Free(part.into_rows()))
            .collect();
        let count = self.used.len();
        let index = |slot: usize| {
            self.used
                .binary_search(&slot)
                .expect("it is one of the used slots")
        };
        let places: Vec<_> = self
            .sources
            .iter()
            .zip(&self.slots)
            .map(|(source, slot)| (source.map(index), slot.map(index)))
            .collect();
        let firsts = (0..width).step_by(columns);
        let mut divided = Vec::with_capacity(firsts.len() * places.len());
        for (source, slot) in places {
            for (number, first) in firsts.clone().enumerate() {
                let initial = match source {
                    None => Initial::Zeros,
                    Some(_) if source == slot => Initial::InPlace,
                    Some(source) => Initial::Of(parts[number * count + source].shared()),
                };
                divided.push(StatePart {
                    initial,
                    target: slot.map(|slot| parts[number * count + slot].taken()),
                    size: (rows, columns.min(width - first)),
                });
            }
        }
        divided
    }

    /// `out` `[rows, width]` by sequences and columns, those of the first sequence first.
    pub(crate) fn divide_rows<'a, E>(
        &self,
        out: &'a mut [E],
        width: usize,
        columns: usize,
    ) -> Vec<Part<'a, E>> {
        let parts = divided(out, width, columns, &self.rows);
        let mut parts: Vec<_> = parts.into_iter().map(Some).collect();
        let count = self.rows.len();
        let mut ordered = Vec::with_capacity(parts.len());
        for sequence in 0..count {
            let of_sequence = parts.iter_mut().skip(sequence).step_by(count);
            ordered.extend(of_sequence.filter_map(Option::take));
        }
        ordered
    }
}

/// Some columns of a used slot: written by one sequence, or read by any number.
enum Used<'a> {
    Free(Vec<&'a mut [f32]>),
    Shared(Vec<&'a [f32]>),
}

impl<'a> Used<'a> {
    fn taken(&mut self) -> Vec<&'a mut [f32]> {
        match std::mem::replace(self, Self::Free(vec![])) {
            Self::Free(rows) => rows,
            Self::Shared(_) => unreachable!("a slot that is written has one sequence"),
        }
    }

    fn shared(&mut self) -> Vec<&'a [f32]> {
        if let Self::Free(rows) = self {
            let rows = std::mem::take(rows).into_iter().map(|row| &*row).collect();
            *self = Self::Shared(rows);
        }
        match self {
            Self::Shared(rows) => rows.clone(),
            Self::Free(_) => unreachable!("it has just been shared"),
        }
    }
}

impl<'a> StatePart<'a> {
    /// The rows of the initial state, which are to become those of the final one: where that is kept, or in `scratch`.
    pub(crate) fn into_rows<'b>(self, scratch: &'b mut Vec<f32>) -> Vec<&'b mut [f32]>
    where
        'a: 'b,
    {
        let (count, columns) = self.size;
        let mut rows: Vec<&'b mut [f32]> = match self.target {
            Some(rows) => rows,
            None => {
                scratch.resize(count * columns, 0.0);
                scratch.chunks_exact_mut(columns).collect()
            }
        };
        match self.initial {
            Initial::InPlace => {}
            Initial::Zeros => rows.iter_mut().for_each(|row| row.fill(0.0)),
            Initial::Of(sources) => {
                for (row, source) in rows.iter_mut().zip(sources) {
                    row.copy_from_slice(source);
                }
            }
        }
        rows
    }
}

/// Slots, -1: none.
fn optional(name: &'static str, slots: &[i64]) -> Result<Vec<Option<usize>>, Error> {
    let slot = |(at, &value): (usize, &i64)| match value {
        -1 => Ok(None),
        _ => usize::try_from(value)
            .map(Some)
            .map_err(|_| Error::StateSlot {
                name,
                at,
                value,
                num_slots: None,
            }),
    };
    slots.iter().enumerate().map(slot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: StateShape = StateShape {
        rows: 2,
        width: 5,
        columns: 2,
    };

    /// Slot `s` has numbers `100 s + 10 row + column`.
    fn states(num_slots: usize) -> Vec<f32> {
        let number = |at: usize| (at / 10 * 100 + at / 5 % 2 * 10 + at % 5) as f32;
        (0..num_slots * 10).map(number).collect()
    }

    #[test]
    fn initial_states_come_from_their_sources_and_final_ones_go_to_their_slots() {
        let step = StateStep::new(&[0, 1, 1, 4, 5, 6], &[3, -1, 1, 0, 1], &[3, 4, 2, -1, -1])
            .expect("it fits");
        assert_eq!((step.num_rows(), step.rows[2].clone()), (6, 1..4));
        let mut actual = states(6);
        step.check(actual.len(), SHAPE).expect("it fits");
        for (number, part) in step.divide(&mut actual, SHAPE).into_iter().enumerate() {
            let (sequence, first) = (number / 3, number % 3 * 2);
            let mut scratch = vec![];
            for (row, numbers) in part.into_rows(&mut scratch).into_iter().enumerate() {
                assert_eq!(numbers.len(), if first == 4 { 1 } else { 2 });
                for (at, number) in numbers.iter_mut().enumerate() {
                    let within = (10 * row + first + at) as f32;
                    let expected = [300.0 + within, 0.0, 100.0 + within, within, 100.0 + within];
                    assert_eq!(*number, expected[sequence], "sequence {sequence}");
                    *number = 1000.0 * (sequence + 1) as f32 + within;
                }
            }
        }
        let mut expected = states(6);
        for (slot, sequence) in [(3, 0), (4, 1), (2, 2)] {
            for (at, number) in expected[slot * 10..][..10].iter_mut().enumerate() {
                *number = (1000 * (sequence + 1) + at / 5 * 10 + at % 5) as f32;
            }
        }
        assert_eq!(actual, expected);
    }

    #[test]
    fn slots_that_one_sequence_writes_belong_to_it_alone() {
        let new = |sources: &[i64], slots: &[i64]| {
            let starts: Vec<i32> = (0..=slots.len() as i32).collect();
            StateStep::new(&starts, sources, slots).map(|_| ())
        };
        assert_eq!(new(&[2, 2, 2, -1], &[0, -1, 1, -1]), Ok(()));
        for (sources, slots) in [
            ([1, -1], [1, 1]),
            ([0, 1], [1, 2]),
            ([1, 0], [2, 1]),
            ([1, 1], [1, -1]),
        ] {
            let refused = Err(Error::SharedState {
                slot: 1,
                sequences: (0, 1),
            });
            let actual = new(&sources, &slots).map_err(|error| match error {
                Error::SharedState { slot, .. } => Error::SharedState {
                    slot,
                    sequences: (0, 1),
                },
                other => other,
            });
            assert_eq!(actual, refused, "{sources:?} {slots:?}");
        }
    }

    #[test]
    fn arrays_that_contradict_each_other_are_refused() {
        let new = |starts: &[i32], sources: &[i64], slots: &[i64]| {
            StateStep::new(starts, sources, slots).map(|_| ())
        };
        assert_eq!(
            new(&[1, 2], &[-1], &[-1]),
            Err(Error::Starts { at: 0, value: 1 })
        );
        assert_eq!(
            new(&[0, 3, 2], &[-1; 2], &[-1; 2]),
            Err(Error::Starts { at: 2, value: 2 })
        );
        assert!(matches!(
            new(&[0, 1], &[-1; 2], &[-1]),
            Err(Error::Length {
                name: "sources",
                ..
            })
        ));
        assert!(matches!(
            new(&[], &[], &[]),
            Err(Error::Length {
                name: "query_start_loc",
                ..
            })
        ));
        for (sources, slots, name) in [([-2], [0], "sources"), ([0], [-2], "slots")] {
            let refused = Error::StateSlot {
                name,
                at: 0,
                value: -2,
                num_slots: None,
            };
            assert_eq!(new(&[0, 1], &sources, &slots), Err(refused));
        }
        let step = StateStep::new(&[0, 1, 2], &[0, -1], &[0, 4]).expect("it fits");
        assert_eq!(step.check(50, SHAPE), Ok(()));
        let beyond = Error::StateSlot {
            name: "slots",
            at: 1,
            value: 4,
            num_slots: Some(4),
        };
        assert_eq!(step.check(40, SHAPE), Err(beyond));
        assert!(matches!(step.check(49, SHAPE), Err(Error::Length { .. })));
    }
}
