//! Replay: gives the operations of a recording to a manager and compares the answers.

use std::collections::HashMap;
use std::io::{BufReader, Read};

use kv_core::{
    Answer, BlockManager, Call, Config, Error, Namespace, Pin, PlanHandle, PlanKey, PrefillRequest,
    Reserve, SeqHandle, SeqKey, SequenceView, Transfer, TransferKey,
};

use crate::error::TraceError;
use crate::frame::Frames;
use crate::report::{Divergence, Limits, Report};
use crate::text::Text;

/// Replays a recording; see [`Record::record`](crate::Record::record).
///
/// # Errors
/// If the file cannot be replayed to its end. A different answer is not an error.
pub fn replay(recording: impl Read) -> Result<Report, TraceError> {
    replay_within(recording, Limits::default())
}

/// Replays a recording within other limits.
///
/// # Errors
/// As [`replay`].
pub fn replay_within(recording: impl Read, limits: Limits) -> Result<Report, TraceError> {
    let mut replay = Replay::open(recording, limits)?;
    while replay.advance()?.is_some() {}
    Ok(replay.report())
}

/// A replay that goes operation by operation.
pub struct Replay<R> {
    frames: Frames<BufReader<R>>,
    recorded_by: String,
    config: Config,
    player: Player,
    divergence: Option<Divergence>,
}

/// A replayed operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Its number, from 1.
    pub number: u64,
    /// The operation.
    pub call: Call,
    /// Its answer, in the recording and in the replay.
    pub answer: Answer,
}

impl Operation {
    /// The operation, as text.
    pub fn call_text(&self) -> String {
        self.call.text()
    }

    /// Its answer, as text.
    pub fn answer_text(&self) -> String {
        self.answer.text()
    }
}

impl<R: Read> Replay<R> {
    /// A manager with the recorded settings, before the first operation.
    ///
    /// # Errors
    /// If the file does not begin as a recording does.
    pub fn open(recording: R, limits: Limits) -> Result<Self, TraceError> {
        let (frames, header) = Frames::open(BufReader::new(recording), limits.operation)?;
        let config = header.config;
        within(
            "the recorded pool's number of blocks",
            config.num_blocks,
            limits.num_blocks,
        )?;
        let positions = config.num_blocks.saturating_mul(config.block_size);
        within(
            "the recorded pool's number of token positions",
            positions,
            limits.tokens,
        )?;
        Ok(Self {
            frames,
            recorded_by: header.recorded_by,
            player: Player::new(&config, limits.tokens).map_err(TraceError::Config)?,
            config,
            divergence: None,
        })
    }

    /// Replays the next operation. `None` at the end of the recording, and from an operation on that is answered
    /// differently.
    ///
    /// # Errors
    /// As [`replay`].
    pub fn advance(&mut self) -> Result<Option<Operation>, TraceError> {
        if self.divergence.is_some() {
            return Ok(None);
        }
        match self.player.advance(&mut self.frames)? {
            Some(Ok(operation)) => Ok(Some(operation)),
            Some(Err(divergence)) => {
                self.divergence = Some(divergence);
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// The version of kv-core that recorded.
    pub fn recorded_by(&self) -> &str {
        &self.recorded_by
    }

    /// The recorded settings, with the actual hash seed.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The first operation that was answered differently.
    pub fn divergence(&self) -> Option<&Divergence> {
        self.divergence.as_ref()
    }

    /// The manager after the operations so far.
    pub fn manager(&mut self) -> &mut BlockManager {
        &mut self.player.manager
    }

    /// The sequences that callers hold, in the order of their creation.
    pub fn sequences(&self) -> Vec<SequenceView<'_>> {
        let handles = self.player.sequences.values();
        let view = |(handle, _): &(SeqHandle, usize)| self.player.manager.view(handle.key()).ok();
        let mut views: Vec<_> = handles.filter_map(view).collect();
        views.sort_unstable_by_key(|view| view.id);
        views
    }

    /// The result so far.
    pub fn report(mut self) -> Report {
        let (kinds, player) = (Call::KINDS.iter().copied(), &mut self.player);
        Report {
            recorded_by: self.recorded_by,
            operations: kinds
                .filter_map(|kind| Some((kind, *player.operations.get(kind)?)))
                .collect(),
            usage: player.manager.usage(),
            stats: player.manager.stats(),
            check: player.manager.check(),
            complete: player.stopped,
            divergence: self.divergence,
            config: self.config,
        }
    }
}

fn within(what: &str, count: usize, limit: usize) -> Result<(), TraceError> {
    match count <= limit {
        true => Ok(()),
        false => Err(TraceError::Limit {
            what: what.into(),
            found: count as u64,
            limit: limit as u64,
        }),
    }
}

/// A manager, and the handles that the callers of the recorded one held.
struct Player {
    manager: BlockManager,
    /// Handles, and the tokens that they were created with.
    sequences: HashMap<u64, (SeqHandle, usize)>,
    plans: HashMap<u64, PlanHandle>,
    pins: HashMap<u64, Pin>,
    transfers: HashMap<u64, Transfer>,
    granted: u64,
    /// Tokens of all sequences at their creation, and blocks of all pins: a fork or a pin takes few bytes of a file and
    /// much memory.
    held: usize,
    most_held: usize,
    operations: HashMap<&'static str, u64>,
    stopped: bool,
}

/// Why an operation has no answer.
enum Halt {
    /// The manager refused the operation.
    Refused(Error),
    /// It names a sequence, plan, pin or transfer that does not exist.
    Missing(&'static str, u64),
    /// Sequences and pins exceed the limit.
    TooMuch,
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl Player {
    fn new(config: &Config, most_held: usize) -> Result<Self, Error> {
        Ok(Self {
            manager: BlockManager::new(config.clone())?,
            sequences: HashMap::new(),
            plans: HashMap::new(),
            pins: HashMap::new(),
            transfers: HashMap::new(),
            granted: 0,
            held: 0,
            most_held,
            operations: HashMap::new(),
            stopped: false,
        })
    }

    /// Plays the next operation. `None` at the end.
    fn advance<R: Read>(
        &mut self,
        frames: &mut Frames<R>,
    ) -> Result<Option<Result<Operation, Divergence>>, TraceError> {
        if !frames.next()? {
            return Ok(None);
        }
        let corrupt = |what| frames.corrupt(what);
        if self.stopped {
            return Err(corrupt("operations after the end".into()));
        }
        let (call, recorded): (Call, Answer) = frames.take()?;
        let number = frames.operation();
        let obtained = match self.apply(&call) {
            Ok(answer) => Ok(answer),
            Err(Halt::Refused(error)) => Err(error),
            Err(Halt::Missing(what, number)) => {
                return Err(corrupt(format!("{what} {number} is not there")));
            }
            Err(Halt::TooMuch) => {
                let what = format!("what sequences and pins hold at operation {number}");
                return within(&what, self.held, self.most_held).map(|()| None);
            }
        };
        if obtained.as_ref() != Ok(&recorded) {
            return Ok(Some(Err(Divergence {
                operation: number,
                call,
                recorded,
                obtained,
            })));
        }
        match &call {
            Call::Stop {} => self.stopped = true,
            call => *self.operations.entry(call.kind()).or_default() += 1,
        }
        Ok(Some(Ok(Operation {
            number,
            call,
            answer: recorded,
        })))
    }

    fn apply(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::Sequence {
                tokens,
                namespace,
                read_cache,
            } => {
                let tokens = tokens.clone();
                let handle = self.manager.sequence(tokens, &namespace[..], *read_cache)?;
                self.keep(handle)?
            }
            Call::SwitchingSequence {
                tokens,
                namespace,
                read_cache,
                position,
                other,
            } => {
                let namespace = Namespace::switching(namespace, *position, other);
                let handle = self
                    .manager
                    .sequence(tokens.clone(), namespace, *read_cache)?;
                self.keep(handle)?
            }
            Call::Fork {
                sequence,
                num_tokens,
            } => {
                let handle = self.manager.fork(self.sequence(*sequence)?, *num_tokens)?;
                self.keep(handle)?
            }
            Call::Append { sequence, tokens } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.append(key, tokens)?).into()
            }
            Call::Trim {
                sequence,
                num_tokens,
            } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.trim(key, *num_tokens)?).into()
            }
            Call::Reset { sequence } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.reset(key)?).into()
            }
            Call::Free { sequence } => {
                self.manager.free(self.sequence(*sequence)?)?;
                self.part(*sequence);
                Answer::Done
            }
            Call::FreeKeeping {
                sequence,
                num_tokens,
            } => {
                let key = self.sequence(*sequence)?;
                self.manager.free_keeping(key, *num_tokens)?;
                self.part(*sequence);
                Answer::Done
            }
            Call::WantSnapshots {
                sequence,
                positions,
            } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.want_snapshots(key, positions)?).into()
            }
            Call::KeepSnapshot { sequence } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.keep_snapshot(key)?).into()
            }
            Call::DropSequence { sequence } => {
                let gone = self.part(*sequence);
                self.forget(gone, "sequence", *sequence)?
            }
            Call::ReuseCached { sequence } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.reuse_cached(key)?).into()
            }
            Call::Extend {
                sequence,
                num_tokens,
            } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.extend(key, *num_tokens)?).into()
            }
            Call::Publish {
                sequence,
                num_tokens,
                tokens,
            } => {
                let key = self.sequence(*sequence)?;
                (&self.manager.publish(key, *num_tokens, tokens)?).into()
            }
            Call::EvictAll {} => (&self.manager.evict_all()).into(),
            Call::AdvanceWeightsVersion {} => (&self.manager.advance_weights_version()?).into(),
            Call::Stop {} => (&self.manager.usage()).into(),
            _ => return self.apply_to_pins(call),
        })
    }

    fn apply_to_pins(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::MatchPrefix { tokens, namespace } => {
                let pin = self.manager.match_prefix(tokens, &namespace[..])?;
                self.grant(pin)?
            }
            Call::MatchSwitchingPrefix {
                tokens,
                namespace,
                position,
                other,
            } => {
                let namespace = Namespace::switching(namespace, *position, other);
                let pin = self.manager.match_prefix(tokens, namespace)?;
                self.grant(pin)?
            }
            Call::Pin { sequence } => {
                let pin = self.manager.pin(self.sequence(*sequence)?)?;
                self.grant(pin)?
            }
            Call::Attach { sequence, pin } => {
                let (key, number) = (self.sequence(*sequence)?, *pin);
                let pin = self.pins.get(pin);
                let pin = pin.ok_or(Halt::Missing("pin", number))?;
                (&self.manager.attach(key, pin)?).into()
            }
            Call::DropPin { pin } => {
                let gone = self.pins.remove(pin);
                self.held -= gone.as_ref().map_or(0, Pin::num_blocks);
                self.forget(gone, "pin", *pin)?
            }
            Call::Evict { num_blocks } => {
                let (_, pin) = self.manager.evict(*num_blocks);
                self.grant(pin)?
            }
            _ => return self.apply_to_transfers(call),
        })
    }

    fn apply_to_transfers(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::Reserve {
                sequence,
                num_tokens,
            } => {
                let reserve = self
                    .manager
                    .reserve(self.sequence(*sequence)?, *num_tokens)?;
                let answer = (&reserve).into();
                if let Reserve::Reserved(transfer) = reserve {
                    self.transfers.insert(transfer.key().serial(), transfer);
                }
                answer
            }
            Call::Complete {
                transfer,
                num_blocks,
            } => {
                let key = self.transfer(*transfer)?;
                let reused = self.manager.complete(key, *num_blocks)?;
                self.transfers.remove(transfer);
                (&reused).into()
            }
            Call::Abandon { transfer } => {
                let key = self.transfer(*transfer)?;
                (&self.manager.abandon(key)?).into()
            }
            Call::DropTransfer { transfer } => {
                let gone = self.transfers.remove(transfer);
                self.forget(gone, "transfer", *transfer)?
            }
            _ => return self.apply_to_steps(call),
        })
    }

    fn apply_to_steps(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::BeginStep { token_budget } => {
                let handle = self.manager.begin_step(*token_budget)?;
                let key = handle.key();
                self.plans.insert(key.serial(), handle);
                (&key).into()
            }
            Call::Decode {
                plan,
                sequences,
                lookahead,
            } => {
                let keys = sequences.iter().map(|&id| self.sequence(id));
                let keys = keys.collect::<Result<Vec<_>, _>>()?;
                let rejected = self.manager.decode(self.plan(*plan)?, &keys, *lookahead)?;
                (&rejected).into()
            }
            Call::Speculate {
                plan,
                sequence,
                drafts,
            } => {
                let (plan, key) = (self.plan(*plan)?, self.sequence(*sequence)?);
                (&self.manager.speculate(plan, key, drafts)?).into()
            }
            Call::Draft {
                plan,
                sequences,
                drafts,
                counts,
            } => {
                let keys = sequences.iter().map(|&id| self.sequence(id));
                let keys = keys.collect::<Result<Vec<_>, _>>()?;
                let plan = self.plan(*plan)?;
                (&self.manager.draft(plan, &keys, drafts, counts)?).into()
            }
            Call::Prefill {
                plan,
                sequence,
                max_tokens,
                spare_blocks,
                replay,
            } => {
                let (plan, key) = (self.plan(*plan)?, self.sequence(*sequence)?);
                let request = PrefillRequest {
                    max_tokens: *max_tokens,
                    spare_blocks: *spare_blocks,
                    replay: *replay,
                };
                (&self.manager.prefill_again(plan, key, request)?).into()
            }
            Call::Cancel { plan, sequence } => {
                let (plan, key) = (self.plan(*plan)?, self.sequence(*sequence)?);
                (&self.manager.cancel(plan, key)?).into()
            }
            _ => return self.close(call),
        })
    }

    /// The operations that close a step.
    fn close(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::Commit {
                plan,
                tokens,
                counts,
            } => {
                let one_each = vec![1; tokens.len()];
                let counts = if counts.is_empty() { &one_each } else { counts };
                let key = self.plan(*plan)?;
                self.manager.copies(key)?;
                let remappings = self.manager.commit_accepted(key, tokens, counts)?;
                self.plans.remove(plan);
                (&remappings).into()
            }
            Call::Rollback { plan } => {
                self.manager.rollback(self.plan(*plan)?)?;
                self.plans.remove(plan);
                Answer::Done
            }
            Call::DropPlan { plan } => {
                let gone = self.plans.remove(plan);
                self.forget(gone, "step", *plan)?
            }
            other => return Err(Halt::Missing(other.kind(), 0)),
        })
    }

    /// Drops a handle, as its owner did, and lets the manager drain it.
    fn forget<T>(
        &mut self,
        gone: Option<T>,
        what: &'static str,
        number: u64,
    ) -> Result<Answer, Halt> {
        drop(gone.ok_or(Halt::Missing(what, number))?);
        self.manager.drain_deferred();
        Ok(Answer::Done)
    }

    fn keep(&mut self, handle: SeqHandle) -> Result<Answer, Halt> {
        let key = handle.key();
        let tokens = self.manager.view(key)?.tokens.len();
        self.sequences.insert(handle.id(), (handle, tokens));
        self.hold(tokens)?;
        Ok((&key).into())
    }

    fn part(&mut self, id: u64) -> Option<SeqHandle> {
        let (handle, tokens) = self.sequences.remove(&id)?;
        self.held -= tokens;
        Some(handle)
    }

    /// Keeps a pin under its number, which the manager counts the same way. The end of an empty pin is not recorded.
    fn grant(&mut self, pin: Pin) -> Result<Answer, Halt> {
        self.granted += 1;
        let blocks = pin.num_blocks();
        if blocks > 0 {
            self.pins.insert(self.granted, pin);
        }
        self.hold(blocks)?;
        Ok((&blocks).into())
    }

    fn hold(&mut self, count: usize) -> Result<(), Halt> {
        self.held += count;
        match self.held <= self.most_held {
            true => Ok(()),
            false => Err(Halt::TooMuch),
        }
    }

    fn sequence(&self, id: u64) -> Result<SeqKey, Halt> {
        let key = self.sequences.get(&id).map(|(handle, _)| handle.key());
        key.ok_or(Halt::Missing("sequence", id))
    }

    fn transfer(&self, serial: u64) -> Result<TransferKey, Halt> {
        let key = self.transfers.get(&serial).map(Transfer::key);
        key.ok_or(Halt::Missing("transfer", serial))
    }

    fn plan(&self, serial: u64) -> Result<PlanKey, Halt> {
        let key = self.plans.get(&serial).map(PlanHandle::key);
        key.ok_or(Halt::Missing("step", serial))
    }
}
