//! Block managers of another program: a line each way for each call.

use std::cell::RefCell;
use std::fmt::{Arguments, Write as _};
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::rc::Rc;

use crate::manager::{BlockManager, Prefilled, Promises, StateCopy};

/// Both ends of a connection: answers, and calls.
type Ends = (Box<dyn BufRead>, Box<dyn Write>);

/// A program with block managers, in any language. The README of the crate has the protocol.
#[derive(Clone)]
pub struct Remote(Rc<RefCell<Connection>>);

struct Connection {
    connect: Box<dyn Fn() -> io::Result<Ends>>,
    /// `None` before the first call, and after the program ended.
    ends: Option<Ends>,
}

impl Remote {
    /// A program that is started when it is needed, and again after it crashed.
    pub fn program(command: Vec<String>) -> Self {
        Self::connected_by(move || {
            let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
            let mut command = Command::new(program);
            command.args(arguments);
            let mut child = command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            match (child.stdout.take(), child.stdin.take()) {
                (Some(output), Some(input)) => {
                    Ok((Box::new(BufReader::new(output)) as _, Box::new(input) as _))
                }
                _ => Err(io::ErrorKind::BrokenPipe.into()),
            }
        })
    }

    /// A program that `connect` reaches: it reads calls from the second end, and writes answers to the first.
    pub fn connected_by(
        connect: impl Fn() -> io::Result<(Box<dyn BufRead>, Box<dyn Write>)> + 'static,
    ) -> Self {
        Self(Rc::new(RefCell::new(Connection {
            connect: Box::new(connect),
            ends: None,
        })))
    }

    /// A new manager of the program, in place of the one before.
    ///
    /// # Panics
    /// If the program cannot be started, or refuses. [`check`](crate::check) reports that.
    pub fn manager(&self, num_blocks: usize, block_size: usize) -> RemoteManager {
        let answer = self.text(format_args!("new {num_blocks} {block_size}"));
        let mut promises = Promises::default();
        for name in answer.split_whitespace() {
            match name {
                "reuses_live_prefixes" => promises.reuses_live_prefixes = true,
                "deduplicates" => promises.deduplicates = true,
                "forks" => promises.forks = true,
                _ => match name.strip_prefix("state_blocks=").map(str::parse) {
                    Some(Ok(blocks)) => promises.state_blocks = blocks,
                    _ => panic!("there is no promise {name:?}"),
                },
            }
        }
        RemoteManager {
            remote: self.clone(),
            promises,
        }
    }

    fn text(&self, call: Arguments) -> String {
        let mut connection = self.0.borrow_mut();
        let exchange = connection.exchange(call);
        if exchange.is_err() {
            connection.ends = None;
        }
        match exchange {
            Ok(answer) => match answer.strip_prefix("error ") {
                Some(message) => panic!("{message}"),
                None => answer,
            },
            Err(error) => panic!("{call} has no answer: {error}"),
        }
    }

    /// The answer as numbers; `None` for `-`.
    fn numbers(&self, call: Arguments) -> Option<Vec<u64>> {
        let answer = self.text(call);
        let number = |word: &str| match word.parse() {
            Ok(number) => number,
            Err(_) => panic!("{call} is answered by {answer:?}"),
        };
        (answer.trim() != "-").then(|| answer.split_whitespace().map(number).collect())
    }

    fn number(&self, call: Arguments) -> usize {
        match self.numbers(call).as_deref() {
            Some([number]) => *number as usize,
            other => panic!("{call} is answered by {other:?}, not by a number"),
        }
    }

    fn done(&self, call: Arguments) {
        let answer = self.text(call);
        assert!(answer.trim().is_empty(), "{call} is answered by {answer:?}");
    }
}

impl Connection {
    fn exchange(&mut self, call: Arguments) -> io::Result<String> {
        if self.ends.is_none() {
            self.ends = Some((self.connect)()?);
        }
        let Some((answers, calls)) = &mut self.ends else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        writeln!(calls, "{call}")?;
        calls.flush()?;
        let mut answer = String::new();
        match answers.read_line(&mut answer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(answer.trim_end().to_owned()),
        }
    }
}

/// A block manager of a [`Remote`] program.
///
/// # Panics
/// Each call panics if the program answers with an error, or not as the protocol says. [`check`](crate::check) reports that.
pub struct RemoteManager {
    remote: Remote,
    promises: Promises,
}

impl RemoteManager {
    /// Copies as `ID POSITION COUNT BLOCK ...`, one after the other.
    fn state_copies(&self, call: &str) -> Vec<StateCopy> {
        let numbers = self.remote.numbers(format_args!("{call}"));
        let numbers = numbers.unwrap_or_default();
        let (mut rest, mut copies) = (&numbers[..], Vec::new());
        while let [id, position, count, blocks @ ..] = rest {
            let (own, others) = blocks
                .split_at_checked(*count as usize)
                .unwrap_or_else(|| panic!("{call} is answered by {numbers:?}"));
            copies.push(StateCopy {
                id: *id,
                position: *position as usize,
                blocks: own.iter().map(|block| *block as u32).collect(),
            });
            rest = others;
        }
        assert!(rest.is_empty(), "{call} is answered by {numbers:?}");
        copies
    }
}

fn words(numbers: impl IntoIterator<Item = u64>) -> String {
    numbers.into_iter().fold(String::new(), |mut text, number| {
        let _ = write!(text, " {number}");
        text
    })
}

impl BlockManager for RemoteManager {
    fn promises(&self) -> Promises {
        self.promises
    }

    fn add(&mut self, id: u64, namespace: u8, tokens: &[u32]) {
        let tokens = words(tokens.iter().map(|token| u64::from(*token)));
        self.remote
            .done(format_args!("add {id} {namespace}{tokens}"));
    }

    fn prefill(&mut self, id: u64, max_tokens: usize) -> Option<Prefilled> {
        let call = format_args!("prefill {id} {max_tokens}");
        match self.remote.numbers(call)?.as_slice() {
            [cached, computed] => Some(Prefilled {
                cached: *cached as usize,
                computed: *computed as usize,
            }),
            other => panic!("{call} is answered by {other:?}, not by two numbers"),
        }
    }

    fn decode(&mut self, id: u64) -> bool {
        self.remote.numbers(format_args!("decode {id}")).is_some()
    }

    fn copies(&mut self) -> Vec<(u32, u32)> {
        let numbers = self.remote.numbers(format_args!("copies"));
        let blocks: Vec<_> = numbers.unwrap_or_default();
        let pairs = blocks.chunks_exact(2);
        assert!(
            pairs.remainder().is_empty(),
            "copies are answered by {blocks:?}"
        );
        pairs.map(|pair| (pair[0] as u32, pair[1] as u32)).collect()
    }

    fn state_loads(&mut self) -> Vec<StateCopy> {
        self.state_copies("state_loads")
    }

    fn state_saves(&mut self) -> Vec<StateCopy> {
        self.state_copies("state_saves")
    }

    fn commit(&mut self, sampled: &[(u64, u32)]) {
        let pairs = sampled
            .iter()
            .flat_map(|(id, token)| [*id, u64::from(*token)]);
        self.remote.done(format_args!("commit{}", words(pairs)));
    }

    fn append(&mut self, id: u64, tokens: &[u32]) {
        let tokens = words(tokens.iter().map(|token| u64::from(*token)));
        self.remote.done(format_args!("append {id}{tokens}"));
    }

    fn fork(&mut self, id: u64, child: u64) {
        self.remote.done(format_args!("fork {id} {child}"));
    }

    fn preempt(&mut self, id: u64) {
        self.remote.done(format_args!("preempt {id}"));
    }

    fn free(&mut self, id: u64) {
        self.remote.done(format_args!("free {id}"));
    }

    fn table(&self, id: u64) -> Vec<u32> {
        let blocks = self.remote.numbers(format_args!("table {id}"));
        blocks
            .unwrap_or_default()
            .iter()
            .map(|block| *block as u32)
            .collect()
    }

    fn num_computed(&self, id: u64) -> usize {
        self.remote.number(format_args!("num_computed {id}"))
    }

    fn available(&mut self) -> usize {
        self.remote.number(format_args!("available"))
    }
}
