import { useState } from "preact/hooks";
import { useFrames } from "./hooks";
import type { Live } from "./live";
import type { Request } from "./state";
import { seconds } from "./words";

const FEW = 20;

interface Props {
  live: Live;
  chosen: number | null;
  choose: (number: number | null) => void;
}

const slackOf = (request: Request): number | null =>
  request.deadline_s === null ? null : request.deadline_s - (request.finish_s ?? request.eta_s);

/** Open requests, the one with the least slack first, and those that have just ended. */
export function Queue({ live, chosen, choose }: Props) {
  useFrames(live);
  const [isAll, setAll] = useState(false);
  const { state } = live;
  if (!state) return null;
  const open = [...state.requests].sort((a, b) => (slackOf(a) ?? 1e12) - (slackOf(b) ?? 1e12));
  const shown = isAll ? open : open.slice(0, FEW);
  const ended = [...live.requests.values()].filter((one) => one.finish_s !== null).slice(-8).reverse();
  const others = state.num_open - state.num_own;
  return (
    <section class="card table" aria-label="Queue">
      <div class="bar">
        <h2>Queue</h2>
        <span class="soft num">
          {state.num_own} open{others ? `, ${others} of other tenants` : ""}; {seconds(state.backlog_s)} of device time
        </span>
      </div>
      <table>
        <thead>
          <tr>
            <th>request</th>
            <th class="wide-only">class</th>
            <th class="wide-only">tenant</th>
            <th>progress</th>
            <th class="wide-only">due in</th>
            <th>ready in</th>
            <th>slack</th>
          </tr>
        </thead>
        <tbody>
          {shown.map((one) => (
            <Row key={one.number} live={live} one={one} isChosen={one.number === chosen} choose={choose} now_s={state.now_s} />
          ))}
          {!shown.length && (
            <tr>
              <td colSpan={7} class="soft">
                Nothing waits.
              </td>
            </tr>
          )}
        </tbody>
        {ended.length > 0 && (
          <tbody class="ended" aria-label="Ended lately">
            {ended.map((one) => (
              <Row key={one.number} live={live} one={one} isChosen={one.number === chosen} choose={choose} now_s={state.now_s} />
            ))}
          </tbody>
        )}
      </table>
      {open.length > FEW && (
        <div class="bar">
          <button class="tool" onClick={() => setAll(!isAll)}>
            {isAll ? "Show fewer" : `Show ${open.length - FEW} more`}
          </button>
        </div>
      )}
    </section>
  );
}

interface RowProps {
  live: Live;
  one: Request;
  isChosen: boolean;
  choose: (number: number | null) => void;
  now_s: number;
}

function Row({ live, one, isChosen, choose, now_s }: RowProps) {
  const slack = slackOf(one);
  const isEnded = one.finish_s !== null;
  return (
    <tr class={isChosen ? "chosen" : ""}>
      <td>
        <button aria-pressed={isChosen} onClick={() => choose(isChosen ? null : one.number)}>
          <i class="swatch" style={{ background: live.colour(one.number).plain }} /> {one.number} · {one.model} {one.size}
        </button>
      </td>
      <td class="wide-only">{one.class}</td>
      <td class="wide-only">{one.tenant}</td>
      <td>
        {isEnded ? (
          <span class={one.on_time === false ? "bad" : one.on_time ? "good" : ""}>
            {one.on_time === null ? one.status : one.status !== "done" ? one.status : one.on_time ? "on time" : "late"}
          </span>
        ) : (
          <>
            <progress max={one.steps} value={one.steps_done} aria-label="Steps" /> {one.steps_done}/{one.steps}{" "}
            <span class="soft wide-only">{one.status}</span>
          </>
        )}
      </td>
      <td class="wide-only">{one.deadline_s === null ? "–" : isEnded ? "" : seconds(one.deadline_s - now_s)}</td>
      <td>{isEnded ? `took ${seconds(one.finish_s! - one.arrival_s)}` : seconds(Math.max(0, one.eta_s - now_s))}</td>
      <td class={slack === null ? "" : slack < 0 ? "bad" : "good"}>
        {slack === null ? "–" : seconds(slack)}
        {one.is_promise ? <span title="promised"> ✓</span> : null}
      </td>
    </tr>
  );
}
