"""Several jobs that every planner plans together."""

import csv

from cells import PLANNERS, SEVERAL


class Several:
    """Jobs side by side on one device, planned together at the real latencies by every planner."""

    def __init__(self, bench, label, jobs):
        self.bench, self.label, self.jobs, self.device = bench, label, jobs, jobs[0].device
        self.real = bench.folder / f"{len(jobs)}-{jobs[0].name}.{self.device}.several.csv"
        rows = {}
        for job in jobs:
            with open(job.real, newline="") as file:
                head, *lines = csv.reader(file)
                # Equal operators take equally long, in whichever net.
                rows = {line[0]: line for line in lines} | rows
        with open(self.real, "w", newline="") as out:
            csv.writer(out).writerows([head, *rows.values()])

    def compare(self, budgets, planners):
        graphs = [job.graph for job in self.jobs]
        arguments = [
            *graphs,
            "--device",
            self.device,
            "--latencies",
            self.real,
            "--budget",
            ",".join(budgets),
            "--planners",
            ",".join(planners),
        ]
        rows = self.bench.compare(*arguments)
        for row in rows:
            # One job's round is its iteration.
            for key in ["iteration_ns", "unplanned_iteration_ns"]:
                if key in row:
                    row[key.replace("iteration", "round")] = row.pop(key)
            for key in ["extra", "bound_ns", "bound_bytes", "stall_ns", "device"]:
                row.pop(key, None)
        return [
            {"jobs": self.label, "copies": len(self.jobs), "device": self.device, **row}
            for row in rows
        ]

    def rows(self):
        """Every planner at every budget; and neap within the peak of every other's plan that none
        of its own plans is below in both peak and time.
        """
        rows = [row | {"rule": "budget"} for row in self.compare(SEVERAL, PLANNERS)]
        known = [row for row in rows if row["planner"] == "neap" and row["fits"]]
        for other in [row for row in rows if row["planner"] != "neap" and row["fits"]]:
            if not any(
                row["peak_bytes"] <= other["peak_bytes"] and row["round_ns"] <= other["round_ns"]
                for row in known
            ):
                for row in self.compare([str(other["peak_bytes"])], ["neap"]):
                    rows.append(row | {"rule": f"peak of {other['planner']}, {other['budget']}"})
                    known += [row] if row["fits"] else []
        return rows
