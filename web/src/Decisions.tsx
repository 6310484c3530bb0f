import { useEffect, useState } from "preact/hooks";
import { Refused, get } from "./api";
import type { Decision } from "./state";

/** What the scheduler decided about a request, and why. It is asked again whenever `version` changes. */
export function Decisions({ uid, version }: { uid: string; version: number | string }) {
  const [decisions, setDecisions] = useState<Decision[]>([]);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    let isCurrent = true;
    get<{ decisions: Decision[] }>(`/v1/requests/${uid}/decisions`).then(
      (answer) => isCurrent && (setDecisions(answer.decisions), setTrouble("")),
      (error: unknown) => isCurrent && setTrouble(error instanceof Refused ? error.message : "The server does not answer."),
    );
    return () => {
      isCurrent = false;
    };
  }, [uid, version]);
  if (trouble) return <p class="soft">{trouble}</p>;
  return (
    <ol class="decisions">
      {decisions.map((one, place) => (
        <li key={place}>
          <span class="num">+{one.at_s.toFixed(2)} s</span>
          <span>{one.text}</span>
        </li>
      ))}
    </ol>
  );
}
