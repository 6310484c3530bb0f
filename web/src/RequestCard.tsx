import { Decisions } from "./Decisions";
import { useFrames } from "./hooks";
import type { Live } from "./live";
import { seconds } from "./words";

interface Props {
  live: Live;
  number: number;
  close: () => void;
}

/** One request: what was asked for, how it stands, and what was decided about it. */
export function RequestCard({ live, number, close }: Props) {
  useFrames(live);
  const one = live.requests.get(number);
  if (!one) return null;
  const slack = one.deadline_s === null ? null : one.deadline_s - (one.finish_s ?? one.eta_s);
  // They grow with the runs of the request.
  const runs = live.tiles.reduce((count, tile) => count + (tile.requests.includes(number) ? 1 : 0), 0);
  return (
    <aside class="card request" aria-label={`Request ${number}`}>
      <div class="bar">
        <h2>
          <i class="swatch" style={{ background: live.colour(number).plain }} /> Request {number}
        </h2>
        <button class="tool" aria-label="Close" onClick={close}>
          ×
        </button>
      </div>
      <dl>
        <dt>asked for</dt>
        <dd>
          {one.model}, {one.size}, {one.steps} steps
        </dd>
        <dt>from</dt>
        <dd>
          {one.tenant}, {one.class}
        </dd>
        <dt>state</dt>
        <dd>{one.status}</dd>
        <dt>deadline</dt>
        <dd>
          {one.deadline_s === null
            ? "none"
            : `${seconds(one.deadline_s - one.arrival_s)} after arrival${one.is_promise ? ", promised" : ""}`}
        </dd>
        <dt>{one.finish_s === null ? "expected" : "ended"}</dt>
        <dd>{seconds((one.finish_s ?? one.eta_s) - one.arrival_s)} after arrival</dd>
        {slack !== null && (
          <>
            <dt>slack</dt>
            <dd class={slack < 0 ? "bad" : "good"}>{seconds(slack)}</dd>
          </>
        )}
        <dt>uid</dt>
        <dd class="uid">{one.uid}</dd>
      </dl>
      <h3>Decisions</h3>
      <Decisions uid={one.uid} version={`${runs} ${one.status}`} />
    </aside>
  );
}
