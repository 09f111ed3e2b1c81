//! Replaying: gives the operations of a recording to a manager and compares the answers.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufReader, Read};

use super::call::{Answer, Call};
use super::code::Bytes;
use super::error::TraceError;
use super::frame::Frames;
use super::settings::read_header;
use crate::config::Config;
use crate::error::Error;
use crate::handle::{PlanHandle, SeqHandle};
use crate::ids::{PlanKey, SeqKey};
use crate::lease::Lease;
use crate::manager::BlockManager;
use crate::stats::{Ledger, Stats};

/// What a replay may take, whatever the file says.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Blocks of the pool.
    pub num_blocks: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            num_blocks: 1 << 24,
        }
    }
}

/// What a replay came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// The version of kv-core that recorded.
    pub recorded_by: String,
    /// The recorded settings; the hash seed is the one that was in force.
    pub config: Config,
    /// How many operations of each kind were replayed, in the order of [`Call::KINDS`].
    pub operations: Vec<(&'static str, u64)>,
    /// Where every block is at the end.
    pub ledger: Ledger,
    /// The counters at the end.
    pub stats: Stats,
    /// What [`BlockManager::check`] says at the end.
    pub check: Result<(), String>,
    /// The recording was ended by [`BlockManager::stop_recording`].
    pub complete: bool,
    /// The first operation that was answered otherwise; nothing was replayed after it.
    pub divergence: Option<Divergence>,
}

/// An operation that a replay answered otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Which one, counted from 1.
    pub operation: u64,
    /// The operation.
    pub call: Call,
    /// Its answer in the recording.
    pub recorded: Answer,
    /// Its answer now.
    pub obtained: Result<Answer, Error>,
}

impl Divergence {
    /// The answer now, in words.
    pub fn obtained_in_words(&self) -> String {
        match &self.obtained {
            Ok(answer) => answer.to_string(),
            Err(error) => format!("refused, {error}"),
        }
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "operation {}, {}: recorded {}; obtained {}",
            self.operation,
            self.call,
            self.recorded,
            self.obtained_in_words()
        )
    }
}

/// Replays a recording; see [`BlockManager::record`].
///
/// # Errors
/// Why the file cannot be replayed to its end. Operations that are answered otherwise are no error.
pub fn replay(recording: impl Read) -> Result<Report, TraceError> {
    replay_within(recording, Limits::default())
}

/// Replays a recording within other limits.
///
/// # Errors
/// As [`replay`].
pub fn replay_within(recording: impl Read, limits: Limits) -> Result<Report, TraceError> {
    let mut frames = Frames::open(BufReader::new(recording))?;
    let header = read_header(&mut frames)?;
    let config = header.config;
    if config.num_blocks > limits.num_blocks {
        return Err(TraceError::TooManyBlocks {
            num_blocks: config.num_blocks,
            limit: limits.num_blocks,
        });
    }
    let mut player = Player::new(&config).map_err(TraceError::Config)?;
    let divergence = player.play(&mut frames)?;
    let kinds = Call::KINDS.iter().copied();
    Ok(Report {
        recorded_by: header.recorded_by,
        operations: kinds
            .filter_map(|kind| Some((kind, *player.operations.get(kind)?)))
            .collect(),
        ledger: player.manager.ledger(),
        stats: player.manager.stats(),
        check: player.manager.check(),
        complete: player.stopped,
        divergence,
        config,
    })
}

/// A manager and what the callers of the recorded one held.
struct Player {
    manager: BlockManager,
    sequences: HashMap<u64, SeqHandle>,
    plans: HashMap<u64, PlanHandle>,
    leases: HashMap<u64, Lease>,
    granted: u64,
    operations: HashMap<&'static str, u64>,
    stopped: bool,
}

/// Why there is no answer.
enum Halt {
    /// The manager has refused the call.
    Refused(Error),
    /// The file speaks of something that is not there.
    Missing(&'static str, u64),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl Player {
    fn new(config: &Config) -> Result<Self, Error> {
        Ok(Self {
            manager: BlockManager::new(config.clone())?,
            sequences: HashMap::new(),
            plans: HashMap::new(),
            leases: HashMap::new(),
            granted: 0,
            operations: HashMap::new(),
            stopped: false,
        })
    }

    /// Plays all operations, or up to the first one that is answered otherwise.
    fn play<R: Read>(&mut self, frames: &mut Frames<R>) -> Result<Option<Divergence>, TraceError> {
        while frames.next()? {
            let corrupt = |what| frames.corrupt(what);
            if self.stopped {
                return Err(corrupt("operations after the end".into()));
            }
            let mut body = Bytes::new(frames.body());
            let call = Call::take(&mut body).map_err(corrupt)?;
            let recorded = Answer::take(&mut body).map_err(corrupt)?;
            if !body.is_empty() {
                return Err(corrupt("it goes on after its answer".into()));
            }
            self.manager.take_events(); // nobody else does
            let obtained = match self.apply(&call) {
                Ok(answer) => Ok(answer),
                Err(Halt::Refused(error)) => Err(error),
                Err(Halt::Missing(what, number)) => {
                    return Err(corrupt(format!("{what} {number} is not there")));
                }
            };
            if obtained.as_ref() != Ok(&recorded) {
                return Ok(Some(Divergence {
                    operation: frames.operation(),
                    call,
                    recorded,
                    obtained,
                }));
            }
            match call {
                Call::Stop {} => self.stopped = true,
                call => *self.operations.entry(call.kind()).or_default() += 1,
            }
        }
        Ok(None)
    }

    fn apply(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::Sequence {
                tokens,
                namespace,
                read_cache,
            } => {
                let tokens = tokens.clone();
                let handle = self.manager.sequence(tokens, namespace, *read_cache)?;
                self.keep(handle)
            }
            Call::Fork {
                sequence,
                num_tokens,
            } => {
                let handle = self.manager.fork(self.sequence(*sequence)?, *num_tokens)?;
                self.keep(handle)
            }
            Call::Append { sequence, tokens } => self
                .manager
                .append(self.sequence(*sequence)?, tokens)?
                .into(),
            Call::Trim {
                sequence,
                num_tokens,
            } => self
                .manager
                .trim(self.sequence(*sequence)?, *num_tokens)?
                .into(),
            Call::Reset { sequence } => self.manager.reset(self.sequence(*sequence)?)?.into(),
            Call::Free { sequence } => {
                self.manager.free(self.sequence(*sequence)?)?;
                self.sequences.remove(sequence);
                Answer::Done
            }
            Call::DropSequence { sequence } => {
                let gone = self.sequences.remove(sequence);
                self.forget(gone, "sequence", *sequence)?
            }
            Call::EvictIdle {} => self.manager.evict_idle().into(),
            Call::Stop {} => self.manager.ledger().into(),
            _ => return self.apply_to_leases(call),
        })
    }

    fn apply_to_leases(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::MatchPrefix { tokens, namespace } => {
                let lease = self.manager.match_prefix(tokens, namespace)?;
                self.grant(lease)
            }
            Call::Lease { sequence } => {
                let lease = self.manager.lease(self.sequence(*sequence)?)?;
                self.grant(lease)
            }
            Call::Attach { sequence, lease } => {
                let (key, number) = (self.sequence(*sequence)?, *lease);
                let lease = self.leases.get(lease);
                let lease = lease.ok_or(Halt::Missing("lease", number))?;
                self.manager.attach(key, lease)?.into()
            }
            Call::DropLease { lease } => {
                let gone = self.leases.remove(lease);
                self.forget(gone, "lease", *lease)?
            }
            _ => return self.apply_to_steps(call),
        })
    }

    fn apply_to_steps(&mut self, call: &Call) -> Result<Answer, Halt> {
        Ok(match call {
            Call::BeginStep { token_budget } => {
                let handle = self.manager.begin_step(*token_budget)?;
                let serial = handle.key().serial();
                self.plans.insert(serial, handle);
                serial.into()
            }
            Call::Decode {
                plan,
                sequences,
                lookahead,
            } => {
                let keys = sequences.iter().map(|&id| self.sequence(id));
                let keys = keys.collect::<Result<Vec<_>, _>>()?;
                let misfits = self.manager.decode(self.plan(*plan)?, &keys, *lookahead)?;
                (&misfits).into()
            }
            Call::Speculate {
                plan,
                sequence,
                drafts,
            } => {
                let (plan, key) = (self.plan(*plan)?, self.sequence(*sequence)?);
                self.manager.speculate(plan, key, drafts)?.into()
            }
            Call::Prefill {
                plan,
                sequence,
                max_tokens,
                reserve,
            } => {
                let (plan, key) = (self.plan(*plan)?, self.sequence(*sequence)?);
                let answer = self.manager.prefill(plan, key, *max_tokens, *reserve)?;
                answer.into()
            }
            Call::Cancel { plan, sequence } => {
                let (plan, key) = (self.plan(*plan)?, self.sequence(*sequence)?);
                (&self.manager.cancel(plan, key)?).into()
            }
            _ => return self.close(call),
        })
    }

    /// Ends of steps: all that is left.
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
                let redirects = self.manager.commit_accepted(key, tokens, counts)?;
                self.plans.remove(plan);
                (&redirects).into()
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

    /// Lets go of a handle, as its owner did, and lets the manager know.
    fn forget<T>(
        &mut self,
        gone: Option<T>,
        what: &'static str,
        number: u64,
    ) -> Result<Answer, Halt> {
        drop(gone.ok_or(Halt::Missing(what, number))?);
        self.manager.settle();
        Ok(Answer::Done)
    }

    fn keep(&mut self, handle: SeqHandle) -> Answer {
        let id = handle.id();
        self.sequences.insert(id, handle);
        id.into()
    }

    /// The manager numbers its leases the same way. It says nothing of the end of one on no blocks.
    fn grant(&mut self, lease: Lease) -> Answer {
        self.granted += 1;
        let blocks = lease.num_blocks();
        if blocks > 0 {
            self.leases.insert(self.granted, lease);
        }
        blocks.into()
    }

    fn sequence(&self, id: u64) -> Result<SeqKey, Halt> {
        let found = self.sequences.get(&id).map(SeqHandle::key);
        found.ok_or(Halt::Missing("sequence", id))
    }

    fn plan(&self, serial: u64) -> Result<PlanKey, Halt> {
        let found = self.plans.get(&serial).map(PlanHandle::key);
        found.ok_or(Halt::Missing("step", serial))
    }
}
