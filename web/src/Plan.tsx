import { useEffect, useRef, useState } from "preact/hooks";
import { get, Refused } from "./api";
import type { PlanPoint, PlanResult, PlanState } from "./state";
import { percent, seconds } from "./words";

const AGAIN_MS = 1000;
const WIDTH = 560;
const HEIGHT = 220;
const EDGE = { left: 44, right: 12, top: 12, bottom: 30 };

/** How many devices the traffic of the latest hour needs. */
export function Plan() {
  const [target, setTarget] = useState("95");
  const [state, setState] = useState<PlanState | null>(null);
  const [trouble, setTrouble] = useState("");
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);

  const ask = async (share: number): Promise<void> => {
    clearTimeout(timer.current);
    try {
      const found = await get<PlanState>(`/v1/plan?target=${share}`);
      setTrouble("");
      setState(found);
      if (found.status === "running") timer.current = setTimeout(() => void ask(share), AGAIN_MS);
    } catch (error) {
      setState(null);
      setTrouble(error instanceof Refused ? error.message : "The server does not answer.");
    }
  };
  const submit = (event: Event): void => {
    event.preventDefault();
    void ask(Number((Number(target) / 100).toFixed(6)));
  };
  return (
    <section class="card pad" aria-label="Plan">
      <form class="plan-form" onSubmit={submit}>
        <label>
          On time, %
          <input type="number" min="1" max="99.9" step="any" required value={target} onInput={(event) => setTarget(event.currentTarget.value)} />
        </label>
        <button class="primary" disabled={state?.status === "running"}>
          How many devices?
        </button>
        <span class="soft">By simulation of the requests of the latest hour, beside the server.</span>
      </form>
      {trouble && (
        <p class="bad" role="alert">
          {trouble}
        </p>
      )}
      {state && <Answer state={state} />}
    </section>
  );
}

function Answer({ state }: { state: PlanState }) {
  const asked = `${state.num_requests} requests of ${seconds(state.span_s)}, ${state.num_due} with a deadline`;
  if (state.status === "running") {
    return (
      <p role="status">
        Simulating … {state.simulations} done <span class="soft">({asked})</span>
      </p>
    );
  }
  if (!state.result) {
    return (
      <p class="bad" role="alert">
        No plan: {state.error}
      </p>
    );
  }
  const { result } = state;
  const { points, simulated, live } = result.error;
  return (
    <>
      <p class="plan-answer" role="status">
        {result.devices === null ? (
          "No number of devices is enough"
        ) : (
          <>
            <strong>{result.devices}</strong> device{result.devices === 1 ? "" : "s"} for {percent(state.target)} on time
          </>
        )}
        <span class="soft"> now {state.devices_now}</span>
      </p>
      {result.points.length > 0 && <Curve result={result} state={state} />}
      <table>
        <thead>
          <tr>
            <th>devices</th>
            <th>on time</th>
            <th>95% interval</th>
            <th>target</th>
          </tr>
        </thead>
        <tbody>
          {result.points.map((one) => (
            <tr key={one.devices} class={one.devices === result.devices ? "chosen" : ""}>
              <td>{one.devices}</td>
              <td>
                {one.is_whole ? "" : "≤ "}
                {percent(one.share)}
              </td>
              <td>
                {percent(one.low)} to {percent(one.high)}
              </td>
              <td>{one.verdict}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="soft">
        {asked}. Simulated on the {state.devices_now} devices of now: {percent(simulated)} on time; they had {percent(live)} (
        {points >= 0 ? "+" : "−"}
        {Math.abs(points).toFixed(1)} points). It took {seconds(result.wall_s)}.
      </p>
    </>
  );
}

/** The share on time over the number of devices, with its intervals. */
function Curve({ result, state }: { result: PlanResult; state: PlanState }) {
  const { points } = result;
  const first = points[0]!.devices;
  const last = points.at(-1)!.devices;
  const lowest = Math.max(0, Math.min(state.target, ...points.map((one) => one.low)) - 0.02);
  const x = (devices: number): number =>
    EDGE.left + ((devices - first) / Math.max(1, last - first)) * (WIDTH - EDGE.left - EDGE.right);
  const y = (share: number): number => EDGE.top + ((1 - share) / (1 - lowest)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const line = points.map((one) => `${x(one.devices)},${y(one.share)}`).join(" ");
  const title = (one: PlanPoint): string => `${one.devices} devices: ${percent(one.share)}`;
  return (
    <svg class="growth" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="Share on time over the number of devices">
      {[lowest, state.target, 1].map((share) => (
        <g key={share}>
          <line class={share === state.target ? "target" : "grid"} x1={EDGE.left} x2={WIDTH - EDGE.right} y1={y(share)} y2={y(share)} />
          <text x={EDGE.left - 6} y={y(share) + 4} text-anchor="end">
            {percent(share)}
          </text>
        </g>
      ))}
      <polyline points={line} />
      {points.map((one) => (
        <g key={one.devices} class={one.devices === result.devices ? "chosen" : ""}>
          <line class="interval" x1={x(one.devices)} x2={x(one.devices)} y1={y(one.low)} y2={y(one.high)} />
          <circle cx={x(one.devices)} cy={y(one.share)} r="4" class={one.is_whole ? "" : "open"}>
            <title>{title(one)}</title>
          </circle>
          <text x={x(one.devices)} y={HEIGHT - 10} text-anchor="middle">
            {one.devices}
          </text>
        </g>
      ))}
    </svg>
  );
}
