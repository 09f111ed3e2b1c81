//! Recurrent layers against their definitions in f64, token by token, and the same bits at all levels, in every batch, in
//! every chunking and by any number of threads.

use std::ops::Range;

use crate::functions::activated;
use crate::levels::{Tests, all};
use cpu_kernels::{
    Activation, Attention, ConvRows, DeltaLayer, DeltaRows, DeltaShape, Element, Error,
    GateFunction, GatedNorm, Isa, KeySharing, Mamba2Shape, MambaRows, MambaWeights, Rows,
    ShortConv, StateStep,
};

/// New tokens of the sequences of a step, the slots of their initial states, and of the final ones.
const LENS: [usize; 6] = [1, 40, 0, 5, 1, 3];
const SOURCES: [i64; 6] = [2, -1, 5, 3, 5, -1];
const SLOTS: [i64; 6] = [2, 0, 1, 4, -1, -1];
const NUM_SLOTS: usize = 6;

fn starts(lens: &[usize]) -> Vec<i32> {
    let mut starts = vec![0];
    starts.extend(lens.iter().scan(0, |end, len| {
        *end += *len as i32;
        Some(*end)
    }));
    starts
}

fn whole_step() -> StateStep {
    StateStep::new(&starts(&LENS), &SOURCES, &SLOTS).expect("it fits")
}

/// Numbers between -1 and 1 that bfloat16 has, too.
fn numbers(count: usize, start: usize) -> Vec<f32> {
    let float = |at: usize| ((start + at) * 7919 % 4001) as f32 / 2000.0 - 1.0;
    (0..count)
        .map(|at| u16::narrow(float(at)).widen())
        .collect()
}

fn narrow<E: Element>(floats: &[f32]) -> Vec<E> {
    floats.iter().map(|&float| E::narrow(float)).collect()
}

fn wide(floats: &[f32]) -> Vec<f64> {
    floats.iter().map(|&float| f64::from(float)).collect()
}

fn bits<E: Element>(row: &[E]) -> Vec<u32> {
    row.iter().map(|it| it.widen().to_bits()).collect()
}

fn attention(isa: Isa, threads: usize) -> Attention {
    Attention::with_isa(threads, isa).expect("there are threads")
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn silu(x: f64) -> f64 {
    activated(Activation::Silu, x)
}

/// The arrays of a layer's tokens side by side, as the columns of a projection.
struct Fused {
    memory: Vec<f32>,
    widths: Vec<usize>,
}

impl Fused {
    fn new(widths: &[usize]) -> Self {
        let rows = LENS.iter().sum::<usize>();
        Self {
            memory: numbers(rows * widths.iter().sum::<usize>(), 17),
            widths: widths.to_vec(),
        }
    }

    fn columns(&self, array: usize) -> Range<usize> {
        let first = self.widths[..array].iter().sum::<usize>();
        first..first + self.widths[array]
    }

    fn row(&self, array: usize, row: usize) -> &[f32] {
        let stride = self.widths.iter().sum::<usize>();
        &self.memory[row * stride..][self.columns(array)]
    }

    fn narrow<E: Element>(&self) -> Vec<E> {
        narrow(&self.memory)
    }

    fn rows<'a, E>(&self, memory: &'a [E], array: usize, rows: &Range<usize>) -> Rows<'a, E> {
        let stride = self.widths.iter().sum::<usize>();
        let columns = self.columns(array);
        let end = match rows.is_empty() {
            true => rows.start * stride + columns.start,
            false => (rows.end - 1) * stride + columns.end,
        };
        let memory = &memory[rows.start * stride + columns.start..end];
        Rows::new(memory, rows.len(), columns.len(), stride).expect("it fits")
    }
}

trait Layer {
    /// Numbers of a state, and of a row of outputs.
    fn sizes(&self) -> (usize, usize);

    /// Computes these rows, which are those of the step.
    fn run<E: Element>(
        &self,
        attention: &Attention,
        step: &StateStep,
        rows: Range<usize>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error>;

    /// One row by the definition.
    fn exact(&self, row: usize, state: &mut [f64]) -> Vec<f64>;
}

fn states_of(layer: &impl Layer) -> Vec<f32> {
    numbers(NUM_SLOTS * layer.sizes().0, 3)
}

/// Outputs and states after a whole step.
fn whole<E: Element>(layer: &impl Layer, attention: &Attention) -> (Vec<E>, Vec<f32>) {
    let (mut states, step) = (states_of(layer), whole_step());
    let mut out = vec![E::narrow(f32::NAN); step.num_rows() * layer.sizes().1];
    layer
        .run(attention, &step, 0..step.num_rows(), &mut states, &mut out)
        .expect("it fits");
    (out, states)
}

/// The same, each sequence alone, in chunks of so many tokens.
fn in_chunks<E: Element>(
    layer: &impl Layer,
    attention: &Attention,
    chunk: usize,
) -> (Vec<E>, Vec<f32>) {
    let (size, width) = layer.sizes();
    let initial = states_of(layer);
    let (mut states, mut out) = (initial.clone(), vec![]);
    for (sequence, bounds) in starts(&LENS).windows(2).enumerate() {
        let (mut row, end) = (bounds[0] as usize, bounds[1] as usize);
        // A spare slot holds what is not kept.
        let mut own = initial.clone();
        own.resize((NUM_SLOTS + 1) * size, f32::NAN);
        let spare = NUM_SLOTS as i64;
        let mut source = SOURCES[sequence];
        loop {
            let rows = row..end.min(row + chunk);
            let is_last = rows.end == end;
            let slot = if is_last { SLOTS[sequence] } else { spare };
            let step =
                StateStep::new(&[0, rows.len() as i32], &[source], &[slot]).expect("it fits");
            let mut part = vec![E::narrow(f32::NAN); rows.len() * width];
            layer
                .run(attention, &step, rows.clone(), &mut own, &mut part)
                .expect("it fits");
            out.extend(part);
            (row, source) = (rows.end, slot);
            if is_last {
                break;
            }
        }
        if let Ok(slot) = usize::try_from(SLOTS[sequence]) {
            states[slot * size..][..size].copy_from_slice(&own[slot * size..][..size]);
        }
    }
    (out, states)
}

fn check(layer: &impl Layer, isa: Isa) {
    let (size, width) = layer.sizes();
    let (out, states) = whole::<f32>(layer, &attention(isa, 1));
    let mut expected = wide(&states_of(layer));
    for (sequence, bounds) in starts(&LENS).windows(2).enumerate() {
        let mut state = match usize::try_from(SOURCES[sequence]) {
            Ok(slot) => wide(&states_of(layer)[slot * size..][..size]),
            Err(_) => vec![0.0; size],
        };
        for row in bounds[0] as usize..bounds[1] as usize {
            let exact = layer.exact(row, &mut state);
            for (actual, exact) in out[row * width..][..width].iter().zip(&exact) {
                near(*actual, *exact);
            }
        }
        if let Ok(slot) = usize::try_from(SLOTS[sequence]) {
            expected[slot * size..][..size].copy_from_slice(&state);
        }
    }
    for (actual, exact) in states.iter().zip(&expected) {
        near(*actual, *exact);
    }
    let same = |(other, other_states): (Vec<f32>, Vec<f32>)| {
        assert!(bits(&out) == bits(&other) && bits(&states) == bits(&other_states));
    };
    same(whole(layer, &attention(isa, 3)));
    same(whole(layer, &attention(Isa::Portable, 2)));
    for chunk in [1, 3, 16, 33] {
        same(in_chunks(layer, &attention(isa, 2), chunk));
    }
    let (half, half_states) = whole::<u16>(layer, &attention(isa, 2));
    assert!(half == narrow::<u16>(&out) && bits(&half_states) == bits(&states));
}

fn near(actual: f32, exact: f64) {
    let error = (f64::from(actual) - exact).abs();
    assert!(error <= 1e-5 * exact.abs().max(1.0), "{actual} for {exact}");
}

struct Conv {
    fused: Fused,
    kernel_size: usize,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    activation: Option<Activation>,
    has_gates: bool,
}

impl Layer for Conv {
    fn sizes(&self) -> (usize, usize) {
        let channels = self.fused.widths[0];
        ((self.kernel_size - 1) * channels, channels)
    }

    fn run<E: Element>(
        &self,
        attention: &Attention,
        step: &StateStep,
        rows: Range<usize>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let memory = self.fused.narrow::<E>();
        let array = |number| self.fused.rows(&memory, number, &rows);
        let conv = ShortConv {
            weight: &self.weight,
            kernel_size: self.kernel_size,
            bias: self.bias.as_deref(),
            activation: self.activation,
        };
        let rows = ConvRows {
            x: array(0),
            gates: self.has_gates.then(|| [array(1), array(2)]),
        };
        attention.short_conv(step, &conv, &rows, states, out)
    }

    fn exact(&self, row: usize, state: &mut [f64]) -> Vec<f64> {
        let channels = self.fused.widths[0];
        let [x, first, second] = [0, 1, 2].map(|array| wide(self.fused.row(array, row)));
        let mut inputs = state.to_vec();
        let gated = |(x, gate): (&f64, &f64)| if self.has_gates { x * gate } else { *x };
        inputs.extend(x.iter().zip(&first).map(gated));
        let out = (0..channels).map(|channel| {
            let mut sum = self
                .bias
                .as_ref()
                .map_or(0.0, |bias| f64::from(bias[channel]));
            for position in 0..self.kernel_size {
                let at = position * channels + channel;
                sum += f64::from(self.weight[at]) * inputs[at];
            }
            let out = self.activation.map_or(sum, |it| activated(it, sum));
            if self.has_gates {
                out * second[channel]
            } else {
                out
            }
        });
        let out = out.collect();
        state.copy_from_slice(&inputs[channels..]);
        out
    }
}

fn convolutions_are_near_the_exact_numbers(isa: Isa) {
    for (channels, kernel_size, activation, has_bias, has_gates) in [
        (5, 3, None, false, true),
        (600, 4, Some(Activation::Silu), true, false),
        (32, 2, Some(Activation::Silu), false, true),
    ] {
        let conv = Conv {
            fused: Fused::new(&[channels; 3]),
            kernel_size,
            weight: numbers(kernel_size * channels, 8),
            bias: has_bias.then(|| numbers(channels, 5)),
            activation,
            has_gates,
        };
        check(&conv, isa);
    }
}

struct Delta {
    fused: Fused,
    shape: DeltaShape,
    rate: Vec<f32>,
    dt_bias: Vec<f32>,
    beta_scale: f32,
    epsilon: Option<f32>,
}

const SCALING: f32 = 0.5;

impl Delta {
    fn new(shape: DeltaShape, is_per_number: bool, epsilon: Option<f32>) -> Self {
        let (keys, heads) = (shape.key_heads * shape.key_dim, shape.value_heads);
        let decays = heads * if is_per_number { shape.key_dim } else { 1 };
        Self {
            fused: Fused::new(&[keys, keys, heads * shape.value_dim, decays, heads]),
            shape,
            rate: numbers(heads, 5).iter().map(|it| it - 1.5).collect(),
            dt_bias: numbers(decays, 6),
            beta_scale: 1.0,
            epsilon,
        }
    }
}

impl Layer for Delta {
    fn sizes(&self) -> (usize, usize) {
        let width = self.shape.value_heads * self.shape.value_dim;
        (width * self.shape.key_dim, width)
    }

    fn run<E: Element>(
        &self,
        attention: &Attention,
        step: &StateStep,
        rows: Range<usize>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let memory = self.fused.narrow::<E>();
        let array = |number| self.fused.rows(&memory, number, &rows);
        let rows = DeltaRows {
            query: array(0),
            key: array(1),
            value: array(2),
            decay_gate: array(3),
            beta_gate: array(4),
        };
        let layer = DeltaLayer {
            rate: &self.rate,
            dt_bias: &self.dt_bias,
            beta_scale: self.beta_scale,
            scaling: SCALING,
            epsilon: self.epsilon,
        };
        attention.gated_delta(step, &self.shape, &rows, &layer, states, out)
    }

    fn exact(&self, row: usize, state: &mut [f64]) -> Vec<f64> {
        let DeltaShape {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            sharing,
        } = self.shape;
        let read = |array: usize, head: usize| {
            let head = wide(&self.fused.row(array, row)[head * key_dim..][..key_dim]);
            let squares = head.iter().map(|it| it * it).sum::<f64>();
            let length = self
                .epsilon
                .map_or(1.0, |it| (squares + f64::from(it)).sqrt());
            head.iter().map(|it| it / length).collect::<Vec<_>>()
        };
        let gates = wide(self.fused.row(3, row));
        let betas = wide(self.fused.row(4, row));
        let mut out = vec![];
        for head in 0..value_heads {
            let key_head = match sharing {
                KeySharing::Consecutive => head * key_heads / value_heads,
                KeySharing::Tiled => head % key_heads,
            };
            let beta = f64::from(self.beta_scale) / (1.0 + (-betas[head]).exp());
            let (query, key) = (read(0, key_head), read(1, key_head));
            let state = &mut state[head * key_dim * value_dim..][..key_dim * value_dim];
            for (at, number) in state.iter_mut().enumerate() {
                let gate = match gates.len() == value_heads {
                    true => head,
                    false => head * key_dim + at / value_dim,
                };
                let step = softplus(gates[gate] + f64::from(self.dt_bias[gate]));
                *number *= (f64::from(self.rate[head]) * step).exp();
            }
            for lane in 0..value_dim {
                let answer = |key: &[f64], state: &[f64]| {
                    let terms = key.iter().zip(state[lane..].iter().step_by(value_dim));
                    terms.map(|(key, number)| key * number).sum::<f64>()
                };
                let value = f64::from(self.fused.row(2, row)[head * value_dim + lane]);
                let delta = beta * (value - answer(&key, state));
                for (key, number) in key.iter().zip(state[lane..].iter_mut().step_by(value_dim)) {
                    *number += key * delta;
                }
                out.push(f64::from(SCALING) * answer(&query, state));
            }
        }
        out
    }
}

fn delta_shape(sizes: [usize; 4], sharing: KeySharing) -> DeltaShape {
    let [key_heads, value_heads, key_dim, value_dim] = sizes;
    DeltaShape {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        sharing,
    }
}

fn delta_rules_are_near_the_exact_numbers(isa: Isa) {
    for (sizes, is_per_number) in [
        ([1, 1, 4, 5], false),
        ([2, 4, 16, 16], false),
        ([1, 3, 24, 128], false),
        ([2, 2, 32, 32], true),
        ([1, 2, 7, 115], true),
    ] {
        let shape = delta_shape(sizes, KeySharing::Consecutive);
        check(&Delta::new(shape, is_per_number, Some(1e-6)), isa);
    }
    let shape = delta_shape([2, 4, 2, 48], KeySharing::Tiled);
    let mut plain = Delta::new(shape, false, None);
    plain.beta_scale = 1.5;
    plain.fused.memory.iter_mut().for_each(|it| *it *= 0.5);
    check(&plain, isa);
}

struct Ssm {
    fused: Fused,
    /// None: Mamba.
    shape: Option<Mamba2Shape>,
    a: Vec<f32>,
    dt_bias: Vec<f32>,
    d: Vec<f32>,
    dt_limits: (f32, f32),
    has_gate: bool,
}

impl Ssm {
    fn mamba2(sizes: [usize; 4], dt_limits: (f32, f32), has_gate: bool) -> Self {
        let [heads, head_dim, groups, state_size] = sizes;
        let width = heads * head_dim;
        Self {
            fused: Fused::new(&[
                width,
                heads,
                groups * state_size,
                groups * state_size,
                width,
            ]),
            shape: Some(Mamba2Shape {
                heads,
                head_dim,
                groups,
                state_size,
            }),
            a: numbers(heads, 5).iter().map(|it| it - 1.5).collect(),
            dt_bias: numbers(heads, 6),
            d: numbers(heads, 7),
            dt_limits,
            has_gate,
        }
    }

    fn mamba(channels: usize, state_size: usize, has_gate: bool) -> Self {
        let a = numbers(channels * state_size, 5);
        Self {
            fused: Fused::new(&[channels, channels, state_size, state_size, channels]),
            shape: None,
            a: a.iter().map(|it| it - 1.5).collect(),
            dt_bias: numbers(channels, 6),
            d: numbers(channels, 7),
            dt_limits: (0.0, f32::INFINITY),
            has_gate,
        }
    }
}

impl Layer for Ssm {
    fn sizes(&self) -> (usize, usize) {
        let width = self.fused.widths[0];
        match self.shape {
            Some(shape) => (width * shape.state_size, width),
            None => (self.a.len(), width),
        }
    }

    fn run<E: Element>(
        &self,
        attention: &Attention,
        step: &StateStep,
        rows: Range<usize>,
        states: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let memory = self.fused.narrow::<E>();
        let array = |number| self.fused.rows(&memory, number, &rows);
        let rows = MambaRows {
            x: array(0),
            dt: array(1),
            b: array(2),
            c: array(3),
            gate: self.has_gate.then(|| array(4)),
        };
        let weights = MambaWeights {
            a: &self.a,
            dt_bias: &self.dt_bias,
            d: &self.d,
            dt_limits: self.dt_limits,
        };
        match &self.shape {
            Some(shape) => attention.mamba2(step, shape, &rows, &weights, states, out),
            None => attention.mamba(step, &rows, &weights, states, out),
        }
    }

    fn exact(&self, row: usize, state: &mut [f64]) -> Vec<f64> {
        let [x, dt, b, c, gate] = [0, 1, 2, 3, 4].map(|array| wide(self.fused.row(array, row)));
        let (least, most) = self.dt_limits;
        let step_of = |at: usize| {
            let step = softplus(dt[at] + f64::from(self.dt_bias[at]));
            step.clamp(f64::from(least), f64::from(most))
        };
        let mut out = vec![];
        for (at, &x) in x.iter().enumerate() {
            // The lane's step, its place in the weights, and where its state and its group's numbers are.
            let (head, first, stride, group) = match self.shape {
                Some(Mamba2Shape {
                    heads,
                    head_dim,
                    groups,
                    state_size,
                }) => {
                    let head = at / head_dim;
                    let first = head * state_size * head_dim + at % head_dim;
                    (head, first, head_dim, head * groups / heads * state_size)
                }
                None => (at, at, self.d.len(), 0),
            };
            let state_size = self.sizes().0 / self.sizes().1;
            let step = step_of(head);
            let mut sum = 0.0;
            for number in 0..state_size {
                let a = match self.shape {
                    Some(_) => self.a[head],
                    None => self.a[number * stride + at],
                };
                let place = &mut state[first + number * stride];
                *place = (step * f64::from(a)).exp() * *place + step * b[group + number] * x;
                sum += *place * c[group + number];
            }
            let sum = sum + f64::from(self.d[head]) * x;
            out.push(if self.has_gate {
                sum * silu(gate[at])
            } else {
                sum
            });
        }
        out
    }
}

fn selective_state_spaces_are_near_the_exact_numbers(isa: Isa) {
    let all_steps = (0.0, f32::INFINITY);
    for (sizes, limits, has_gate) in [
        ([1, 5, 1, 3], all_steps, false),
        ([4, 16, 2, 16], (0.5, 0.9), true),
        ([3, 80, 1, 32], all_steps, false),
    ] {
        check(&Ssm::mamba2(sizes, limits, has_gate), isa);
    }
    for (channels, state_size, has_gate) in [(3, 2, false), (600, 16, true)] {
        check(&Ssm::mamba(channels, state_size, has_gate), isa);
    }
}

fn check_gated_norm<E: Element>(isa: Isa, sizes: [usize; 3]) {
    let [group_size, weight, width] = sizes;
    let (count, epsilon) = (90, 1e-5);
    let fused = Fused {
        memory: numbers(count * 2 * width, 0),
        widths: vec![width; 2],
    };
    let (memory, weight) = (fused.narrow::<E>(), narrow::<E>(&numbers(weight, 5)));
    for (gate, is_norm_first) in [
        (GateFunction::Silu, true),
        (GateFunction::Silu, false),
        (GateFunction::Sigmoid, true),
        (GateFunction::Sigmoid, false),
    ] {
        let norm = GatedNorm {
            weight: &weight,
            group_size,
            epsilon,
            gate,
            is_norm_first,
        };
        let compute = |isa, threads, rows: Range<usize>| {
            let mut out = vec![E::narrow(f32::NAN); rows.len() * width];
            let [x, gates] = [0, 1].map(|array| fused.rows(&memory, array, &rows));
            attention(isa, threads)
                .gated_norm(x, gates, &norm, &mut out)
                .expect("it fits");
            out
        };
        let actual = compute(isa, 1, 0..count);
        assert!(bits(&actual) == bits(&compute(isa, 3, 0..count)));
        assert!(bits(&actual) == bits(&compute(Isa::Portable, 2, 0..count)));
        let alone = (0..count).flat_map(|row| compute(isa, 2, row..row + 1));
        assert!(bits(&actual) == bits(&alone.collect::<Vec<_>>()));
        for (row, actual) in actual.chunks(width).enumerate() {
            let factor = |gate: f64| match norm.gate {
                GateFunction::Silu => silu(gate),
                GateFunction::Sigmoid => 1.0 / (1.0 + (-gate).exp()),
            };
            let factors: Vec<f64> = wide(fused.row(1, row)).into_iter().map(factor).collect();
            let mut numbers = wide(fused.row(0, row));
            if !is_norm_first {
                numbers
                    .iter_mut()
                    .zip(&factors)
                    .for_each(|(it, factor)| *it *= factor);
            }
            for (at, actual) in actual.iter().enumerate() {
                let group = &numbers[at / group_size * group_size..][..group_size];
                let squares = group.iter().map(|it| it * it).sum::<f64>();
                let scale = (squares / group_size as f64 + f64::from(epsilon)).sqrt();
                let factor = if is_norm_first { factors[at] } else { 1.0 };
                let weight = f64::from(weight[at % weight.len()].widen());
                let exact = numbers[at] / scale * weight * factor;
                let unit = if size_of::<E>() == 2 {
                    2f64.powi(-8)
                } else {
                    1e-6
                };
                let error = (f64::from(actual.widen()) - exact).abs();
                assert!(
                    error <= unit * exact.abs().max(1e-3),
                    "{} for {exact}",
                    actual.widen()
                );
            }
        }
    }
}

fn gated_norms_are_near_the_exact_numbers(isa: Isa) {
    for sizes in [[5, 5, 15], [128, 128, 512], [48, 96, 96], [577, 577, 577]] {
        check_gated_norm::<f32>(isa, sizes);
        check_gated_norm::<u16>(isa, sizes);
    }
}

/// The error of a layer of these sizes; neither states nor outputs are written.
fn refused(layer: &impl Layer, states: usize, rows: usize, out: usize) -> Option<Error> {
    let (size, width) = layer.sizes();
    let mut states = vec![7.0; states * size / 4];
    let mut out = vec![9.0f32; out * width / 4];
    let step = StateStep::new(&[0, 2, 3], &[-1, 0], &[1, 0]).expect("it fits");
    let actual = layer.run(
        &attention(Isa::Portable, 1),
        &step,
        0..rows,
        &mut states,
        &mut out,
    );
    if actual.is_err() {
        assert!(states.iter().all(|it| *it == 7.0) && out.iter().all(|it| *it == 9.0));
    }
    actual.err()
}

fn check_refusals(layer: &impl Layer) {
    assert_eq!(refused(layer, 8, 3, 12), None);
    let beyond = Error::StateSlot {
        name: "slots",
        at: 0,
        value: 1,
        num_slots: Some(1),
    };
    assert_eq!(refused(layer, 4, 3, 12), Some(beyond));
    for (states, rows, out) in [(7, 3, 12), (8, 2, 12), (8, 4, 12), (8, 3, 8), (8, 3, 16)] {
        let actual = refused(layer, states, rows, out);
        assert!(matches!(actual, Some(Error::Length { .. })), "{actual:?}");
    }
}

fn delta() -> Delta {
    Delta::new(
        delta_shape([2, 4, 4, 4], KeySharing::Consecutive),
        true,
        None,
    )
}

fn conv() -> Conv {
    Conv {
        fused: Fused::new(&[8; 3]),
        kernel_size: 3,
        weight: numbers(24, 0),
        bias: None,
        activation: None,
        has_gates: true,
    }
}

fn arrays_and_slots_that_do_not_fit_are_refused() {
    let all_steps = (0.0, f32::INFINITY);
    check_refusals(&delta());
    check_refusals(&conv());
    check_refusals(&Ssm::mamba2([2, 4, 1, 4], all_steps, true));
    check_refusals(&Ssm::mamba(8, 4, true));
}

fn sizes_that_do_not_fit_are_refused() {
    let of_delta = |change: fn(&mut Delta)| {
        let mut layer = delta();
        change(&mut layer);
        refused(&layer, 8, 3, 12)
    };
    let uneven = of_delta(|it| it.shape.key_heads = 3);
    assert_eq!(
        uneven,
        Some(Error::Groups {
            heads: 4,
            groups: 3
        })
    );
    assert!(matches!(
        of_delta(|it| it.shape.key_dim = 0),
        Some(Error::Zero(_))
    ));
    assert!(matches!(
        of_delta(|it| it.shape.key_dim = 2),
        Some(Error::Length { .. })
    ));
    let of_conv = |change: fn(&mut Conv)| {
        let mut layer = conv();
        change(&mut layer);
        refused(&layer, 8, 3, 12)
    };
    assert!(matches!(
        of_conv(|it| it.kernel_size = 1),
        Some(Error::Zero(_))
    ));
    assert!(matches!(
        of_conv(|it| it.kernel_size = 5),
        Some(Error::Length { .. })
    ));
    assert!(matches!(
        of_conv(|it| it.bias = Some(vec![0.0; 7])),
        Some(Error::Length { .. })
    ));
    let of_ssm = |change: fn(&mut Ssm)| {
        let mut layer = Ssm::mamba2([2, 4, 1, 4], (0.0, 1.0), false);
        change(&mut layer);
        refused(&layer, 8, 3, 12)
    };
    assert!(matches!(
        of_ssm(|it| it.a = vec![-1.0; 3]),
        Some(Error::Length { name: "a", .. })
    ));
    assert!(matches!(
        of_ssm(|it| it.d = vec![]),
        Some(Error::Length { name: "d", .. })
    ));
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    at!(
        tests,
        &all(),
        convolutions_are_near_the_exact_numbers,
        delta_rules_are_near_the_exact_numbers,
        selective_state_spaces_are_near_the_exact_numbers,
        gated_norms_are_near_the_exact_numbers
    );
    once!(
        tests,
        arrays_and_slots_that_do_not_fit_are_refused,
        sizes_that_do_not_fit_are_refused
    );
}
