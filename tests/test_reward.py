"""Tests of reward.py and of the rewards in tasks/.

The answers are 92 golden cases and two tables, RIGHT and WRONG. sympy judges values independently, and `re` the format.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scoring import score_batch  # noqa: E402

import reward  # noqa: E402
from reward import Counting, RewardConfig  # noqa: E402
from rewards.grade import Grader, RolloutStub, check_tasks, grade, make_rollout_stub  # noqa: E402
from tasks import _math_verify, geometry  # noqa: E402

ROWS = [json.loads(line) for line in (ROOT / "tests/data/reward_cases.jsonl").read_text().splitlines()]
ANSWERS = [row for row in ROWS if row["kind"] == "answer"]
RESPONSES = [row for row in ROWS if row["kind"] == "response"]


def example(truth: str, data_source: str = "geo3k", **extra) -> SimpleNamespace:
    messages = [{"role": "user", "content": "Which is right, A, B or C?"}]
    return SimpleNamespace(data_source=data_source, ground_truth=truth, extra=extra, uid="row-7", messages=messages)


def math_verify_process():
    """Return the worker process of math-verify, which the first comparison starts."""
    [process] = _math_verify.own_pool(os.getpid()).processes
    return process.popen


# --- golden cases -------------------------------------------------------------------------------------------------


def test_golden_file_is_complete():
    assert len(ANSWERS) == 76 and len(RESPONSES) == 16
    assert sum(not row["ambiguous"] for row in ANSWERS) == 71
    shared = ROOT.parent / "shared/reference/reward_cases.jsonl"
    if shared.exists():
        assert [json.loads(line) for line in shared.read_text().splitlines()] == ROWS


@pytest.mark.parametrize("row", [row for row in ANSWERS if not row["ambiguous"]], ids=lambda row: row["prediction"])
def test_golden_answer(row):
    start = time.perf_counter()
    assert geometry.grade_geometry(row["response"], row["ground_truth"]) == bool(row["human_should_accept"])
    assert time.perf_counter() - start < 1.0


def test_verdicts_on_ambiguous_rows():
    """Either verdict is defensible. Ours: exact values decide, lists are not numbers, an answer may name the number."""
    verdicts = {row["prediction"]: geometry.grade_geometry(row["response"], row["ground_truth"]) for row in ANSWERS}
    ours = {"z=48": True, "48, 48": False, "\\frac{2}{4}": True, "8.660254037844386": False, "0.48": True}
    assert {row["prediction"] for row in ANSWERS if row["ambiguous"]} == set(ours)
    assert {key: verdicts[key] for key in ours} == ours


DIFFERS_FROM_VERL = {
    "<think>a</think> \\boxed {48}": 0.9,  # verl does not find a box with a space; its format regex still rejects it
    "<think>a</think> \\fbox{48}": 0.9,  # likewise
}


@pytest.mark.parametrize("row", RESPONSES, ids=lambda row: row["note"])
def test_response_scores_as_in_verl(row):
    expected = DIFFERS_FROM_VERL.get(row["response"], row["verl_geo3k_score"])
    assert grade(row["response"], example(row["ground_truth"]))["reward"] == pytest.approx(expected, abs=1e-12)


# --- answers ------------------------------------------------------------------------------------------------------

RIGHT = """
32 | f(3)=32
f(3) = 2^5 | f(3)=32
-\\frac{7}{25} | \\cos 2\\theta = -\\frac{7}{25}
\\cos 2\\theta = -0.28 | \\cos 2\\theta = -\\frac{7}{25}
4x + 6y = 12 | 2x+3y=6
3, 2 | x=3, y=2
y=2, x=3 | x=3, y=2
-3, 3 | x=3, x=-3
BA:CD = 2:3 | AB:DC=2:3
5√3 | 5 \\sqrt { 3 }
16π | 16 \\pi
48° | 48
m\\angle ABC = 48^{\\circ} | 48
m∠1 = 48 | 48
\\angle 1 = 48 | 48
AB = CD = 48 | 48
AB = 2 \\cdot 24 = 48 | 48
\\text{Area} = 48\\text{ cm}^2 | 48
48 \\text{ square units} | 48
48 sq. units | 48
48 cm² | 48 cm^2
48 in. | 48
48 feet | 48 ft
4\\frac{4}{11} | \\frac{48}{11}
4 4/11 | \\frac { 48 } { 11 }
4 4 / 11 | 4 \\frac { 4 } { 11 }
-1\\frac12 | -1.5
13 1/2 | 13.5
3^2 \\frac{1}{4} | 2.25
\\sqrt41 | \\sqrt { 41 }
\\sqrt 41 | \\sqrt { 41 }
∛8 | 2
\\sqrt[3]{-27} | -3
12,345.6 | 12345.6
1\\,000 | 1000
5\\sqrt{3} \\approx 8.66 | 5\\sqrt{3}
AB = 5\\sqrt{3} \\approx 8.66 | 8.66
x \\lt 60 | x < 60
60 > x | x < 60
0<x<60 | 60>x>0
4:6 | 2:3
2/3 | 2:3
2:4:6 | 1:2:3
(2, 3) | (2,3.0)
-3, 3 | 3, -3
(x+1)(x-1) | x^2-1
2\\pi r | r \\cdot 2\\pi
y=2x+3 | 3+2x
Option B | B
(b) | B
ISOSCELES | isosceles
48\\% | 48%
0.48 | 48%
\\sqrt{2}+\\sqrt{3}-\\sqrt{5+2\\sqrt{6}} | 0
\\left(\\frac{1}{2}\\right) | .5
2¹⁰ | 1024
2⁻¹ | 0.5
{ AB = 48 } | 48
OR = 48 | 48
48 degrees | 48^\\circ
0.48 m | 48 cm
4800 cm^2 | 0.48 m^2
48 cm = 0.48 m | 48 cm
48 units | 48 cm
30\\% | 0.3
10\\% \\cdot 480 | 48
30\\% | \\frac{3}{10}
\\frac{a_1}{b} | a_{1} / b
12.5 \\approx 13 | 13
0:5 | 0:3
48 \\quad \\text{cm} | 48
3, \\quad -3 | 3, -3
\\sqrt{x-50} | \\sqrt{-50+x}
(-\\infty, 60) | (-∞,60)
|-3| = 3 | 3
\\textbf{48} | 48
\\textit{48} | 48
\\textsf{48} | 48
\\textbf{(A)} | A
\\textrm{A} | A
\\textbf{\\textit{A}} | A
**A** | A
\\textbf{2:3} | 2:3
\\textbf{4.2 cm} | 4.2
\\textbf{$\\frac{48}{11}$} | \\frac{48}{11}
\\boldsymbol{48} | 48
\\bf 48 | 48
{\\bf 48} | 48
\\underline{48} | 48
\\Large{48} | 48
\\textcolor{red}{48} | 48
48\\rm{cm} | 48 cm
48\\textdegree | 48
48 cm\\textsuperscript{2} | 48 cm^2
48{}^\\circ | 48
48{^\\circ} | 48
48^{\\text{o}} | 48
60^o | 60
60^{\\mathrm{o}} | 60^\\circ
\\left.\\frac{48}{11}\\right. | \\frac{48}{11}
\\sfrac{48}{11} | \\frac{48}{11}
4\\nicefrac{4}{11} | \\frac{48}{11}
5sqrt(3) | 5\\sqrt{3}
5*sqrt(3)/2 | \\frac{5\\sqrt{3}}{2}
4 pi | 4\\pi
x: 48 | 48
x: 48 | x = 48
\\text{Area}: 48 \\text{ cm}^2 | 48
x:y | \\frac{x}{y}
\\left\\{4, 3\\right\\} | 3, 4
\\arcsin(1) | \\frac{\\pi}{2}
\\sin A = \\frac{5}{13} | \\frac{5}{13}
\\tan \\angle ABC = \\frac12 | 0.5
\\sin(30^\\circ) = \\frac12 | \\frac{1}{2}
x = 4 \\text{ and } y = 7 | x = 4, y = 7
3 \\text{ to } 5 | 3:5
\\sin\\theta=0.5 | 0.5
\\sin \\theta = 0.5 | 0.5
\\cos\\alpha = \\frac{1}{2} | 0.5
\\frac{AB}{BC}=\\frac34 | \\frac{3}{4}
AB/BC = 3/4 | 3/4
AB/BC = 3/4 | \\frac{BA}{BC} = \\frac{3}{4}
\\dfrac{AB}{BC} = 0.75 | 3:4
|AB| = 5 | 5
|\\overline{AB}| = 5 | 5
(x, y) = (3, 2) | (3, 2)
(3, 2) | (x, y) = (3, 2)
(x, y, z) = (1, 3, 2) | (1, 3, 2)
\\overset{\\frown}{AB}=60 | 60
m\\overset{\\frown}{AB} = 60^\\circ | 60
\\overset\\frown{AB} = 60 | 60
\\overparen{AB} = 60 | 60
S_{\\triangle ABC}=12 | 12
S_{\\triangle{ABC}} = 12 | 12
S_{\\text{shaded}} = 12 | 12
S_{ABCD} = 12 | 12
x^\\circ = 60^\\circ | 60
x^{\\circ} = 60 | 60^\\circ
6 \\text{ and } 8 | 6, 8
6 and 8 | 8, 6
6 and 8 | 8 \\text{ and } 6
6, 8 | 6 \\text{ and } 8
2, 3, \\text{and } 4 | 2,3,4
28 \\text{ percent} | 28\\%
28 percent | 0.28
32,\\! 349 | 32349
32,\\!349 | 32349
60.0e0 | 60
6e1 | 60
6.02E3 | 6020
60 | 60.0e0
x=3;y=2 | x=3, y=2
x=3; y=2 | x=3;y=2
x=3, y=2 | x=3;y=2
3; -3 | 3, -3
1 \\pm \\sqrt{19} | 1 \\pm \\sqrt{19}
1 + \\sqrt{19}, 1 - \\sqrt{19} | 1 \\pm \\sqrt{19}
1 - \\sqrt{19}, \\sqrt{19} + 1 | 1 \\pm \\sqrt{19}
x = 1 \\pm \\sqrt{19} | 1 + \\sqrt{19}, 1 - \\sqrt{19}
x = -3 \\pm 1 | -2, -4
\\pm 3 | 3, -3
3, -3 | \\pm 3
\\pm 3 | x = \\pm 3
(-\\infty, 2) \\cup (3, \\infty) | (-\\infty,2)\\cup(3,\\infty)
(3, \\infty) \\cup (-\\infty, 2) | (-\\infty,2)\\cup(3,\\infty)
(-\\infty, 2) \\cup (6/2, \\infty) | (-\\infty,2)\\cup(3,\\infty)
(-\\infty,2)∪[3,4]∪[5,6] | [3,4]\\cup(-\\infty,2)\\cup[5,6]
x \\in (-\\infty,2)\\cup(3,\\infty) | (-\\infty,2)\\cup(3,\\infty)
x \\in [2, 3] | [2,3]
5,4,3,2,1 | 1,2,3,4,5
1, 2, 3, 4, 5, \\frac{12}{2} | 6,5,4,3,2,1
right, isosceles | isosceles, right
Isosceles, right | isosceles, right
48 cm, 48 | 48, 0.48 m
B | B. 60
B. 60 | B. 60
\\sin\\theta | \\sin \\theta
\\sin(\\theta) | \\sin \\theta
\\sin 30^\\circ | \\frac{1}{2}
10\\sin(30^\\circ) | 5
\\tan 45^\\circ | 1
\\frac{\\sqrt{3}}{2} | \\sin 60^\\circ
10\\tan 35^\\circ | 10 \\tan 35^\\circ
\\frac{1}{3} | 0.\\overline{3}
\\frac53 | 1.\\overline{6}
0.1\\overline{6} | \\frac{1}{6}
0.(3) | \\frac13
\\{4,3\\} | \\{3, 4\\}
A: 60 | A
(A) x = 60 | A
No | no
"""
WRONG = """
f(3)=33 | f(3)=32
f(6)=64 | f(3)=32
2=3 | f(3)=32
33 | f(3)=32
2=3 | \\cos 2\\theta = -\\frac{7}{25}
\\cos 2\\theta = \\frac{7}{25} | \\cos 2\\theta = -\\frac{7}{25}
\\sin 2\\theta = -\\frac{7}{25} | \\cos 2\\theta = -\\frac{7}{25}
1=1 | 2+3=5
1=2 | \\sqrt{2}=1.414
0=0 | 2x+3y=6
2x+3y=7 | 2x+3y=6
2, 3 | x=3, y=2
y:x = 2:3 | x:y = 2:3
\\sin 30 | 30
\\sin A = \\frac{5}{13} = \\frac{12}{13} | \\frac{5}{13}
4 \\text{ and } 7 | 4
4 \\text{ and } 7 | 4, 7, 11
4 \\text{ and } 7 | (4, 7)
3 \\text{ to } 5 | 3
3 \\text{ or } 4 | 3
3 \\text{ or } 4 | 4
3; 4 | 3
3, 4 | 4
\\pm 3 | 3
x = 47 = 48 | 48
47 \\approx 48.3 | 48.3
5\\sqrt{3} \\approx 9.2 | 5\\sqrt{3}
8.66 | 5\\sqrt{3}
8.6602540378443864676 | 5\\sqrt{3}
16\\pi | 50.265
4 8 | 48
3 4 | 12
48? | 48
48 cm | 48 m
48 cm | 48 cm^2
0.48% | 48%
y=48 | x=48
x \\le 60 | x < 60
x > 60 | x < 60
y < 60 | x < 60
3:2 | 2:3
(3,2) | (2,3)
[2,3) | (2,3)
1, 2, 3 | 1, 2
2\\frac{3}{2} | 3.5
C. 60 | B
B or C | B
B. 60, C. 40 | B
selescosi | isosceles
1/0 | 1
\\sqrt{-1} | 1
-3 | 3
x^2+1 | x^2-1
48 \\quad 47 | 48
48 \\\\ 47 | 48
(x=48) | 48
48 \\cup 47 | 48
5! | 120
 | 48
. | 48
0^{-1} | 60
0^{-1} | 5\\sqrt{3}
0^{-1} | 2:3
-0^{-1} | \\frac{48}{11}
0⁻¹ | 2\\pi
\\frac{1}{0^{-1}} | 0
\\frac{1}{0} | 60
\\sqrt[-3]{0} | 60
\\sqrt[0]{2} | 2
(0^{-1})^0 48 | 48
48 \\cdot \\frac{x-x}{x-x} | 48
48 \\cdot \\frac{\\sqrt{2}+\\sqrt{3}-\\sqrt{5+2\\sqrt{6}}}{\\sqrt{2}+\\sqrt{3}-\\sqrt{5+2\\sqrt{6}}} | 48
2\\pi r + 0 \\cdot 0^{-1} | 2\\pi r
|48| + 0 \\cdot 0^{-1} | 48
48 + 0 \\cdot \\log(0) | 48
48\\infty^0 | 48
\\frac{1}{\\infty} | 0
10^{60} + 5 - 10^{60} | 0
x < 0^{-1} | x < 60
(0^{-1}, 0^{-1}) | (2,3)
0^{-1}, 0^{-1} | 3, -3
0^{-1}:1 | 2:3
1:0^{-1} | 2:3
x = 0^{-1} = 48 | 48
0^{-1} \\approx 48 | 48
0:0 | 2:3
0:0 | 0
0:0:0 | 1:2:3
0:5:6 | 0:3:4
\\frac{4}{5} \\approx \\frac{3}{5} | \\frac{4}{5}
\\frac{4}{5} \\approx \\frac{3}{5} | \\frac{3}{5}
\\frac{4}{5} \\approx \\frac{8}{10} | \\frac{4}{5}
12.01 \\approx 13 | 12.01
12.01 \\approx 13 | 13
8.667 \\approx 8.66 | 8.66
1234 \\approx 1200 | 1200
30\\% | 30
30 | 30\\%
30^\\circ | 30 m
30 degrees | 30 \\text{ ft}
30 cm | 30^\\circ
48 units^2 | 48 units
48 cm = 48 m | 48
48^\\circ cm | 48
\\frac{f}{i} | \\frac{13}{5}
a_1 | B_2
x_{12} = 5 | x_{21} = 5
\\angle ABC = 5 | \\angle ACB = 5
2¹⁰ | 2
x 47 = 48 | 48
not x = 48 | 48
inf = 48 | 48
47 \\equiv 48 | 48
x = |47| = 48 | 48
|48| \\approx 47 | 48
|48| cm | 48 m
50 \\quad -2 | 48
1 \\quad (48) | 48
8.66\\ldots | 8.66
(B) C | B
48<|im_start|> | 48
B. <|im_end|> | B
\\textbf{47} 48 | 48
\\textbf{47}, 48 | 48
4\\textbf{8} | 48
\\textit{B} | A
\\textcolor{red}{47} 48 | 48
**47** 48 | 48
47 \\boxed 48 | 48
47 \\fbox 48 | 48
47 ＼boxed 48 | 48
\\exists 48 \\lfloor \\boxed 47 | 47
\\left.5\\right. | 0.5
2^{o}8 | 28
48 o | 48
\\sqrt{}^2 48 | 48
x: 47 | 48
y: 48 | x = 48
x: 47 = 48 | 48
x: 48 | \\frac{x}{47}
47: 48 | 48
20 | 20\\%
\\{3,4,5\\} | 3, 4
\\{3,4 | 3, 4
pi | p
\\cos\\theta=0.5 | \\sin\\theta = 0.5
\\sin\\theta 0.5 | 0.5
BC/AB = 3/4 | AB/BC = 3/4
\\frac{AB}{BC}=\\frac34=\\frac43 | \\frac{3}{4}
\\frac{AB}{47} = 48 | 48
47/x = 48 | 48
|x| = 5 | 5
|47| = 48 | 48
(y, x) = (3, 2) | (3, 2)
(x, y) = (3, 2) | (2, 3)
(x, y) = (3, 2) | 3
(x, y) = (3, 2) = (2, 3) | (3, 2)
(3, 2) = (3, 2) | (2, 3)
\\overset{47}{AB}=60 | 47
\\overset{\\frown}{47}=60 | 60
S_{47}=12 | 47
47_{\\triangle ABC} = 12 | 12
47^\\circ = 60^\\circ | 60
6 \\text{ and } 8 | 6
6 \\text{ and } 8 | 8
6 \\text{ or } 8 | 6, 8
6 and 8 and 10 | 6, 8
28 \\text{ percent} | 28
28 | 28 percent
32,\\! 349 | 32
32,\\! 349 | 349
60.0e0 | 6
6e1 | 6
6e1 | 61
2e-3 | 0.02
60e0 | 0
60e999999 | 60
x=3;y=2 | 3
x=3;y=2 | x=2, y=3
x=3;x=2 | x=3
1 \\pm \\sqrt{19} | 1 + \\sqrt{19}
1 \\pm \\sqrt{19} | 1 - \\sqrt{19}
1 + \\sqrt{19} | 1 \\pm \\sqrt{19}
1 \\pm 2 \\pm 3 | 1, 2
\\pm 3 | 3
3 \\pm 0 | 3
3 | 3 \\pm 1
\\pm 3 | \\mp 4
(-\\infty, 2) \\cup (3, \\infty) | (-\\infty,2)\\cup[3,\\infty)
(-\\infty, 2) | (-\\infty,2)\\cup(3,\\infty)
(-\\infty,2)\\cup(3,\\infty)\\cup(4,5) | (-\\infty,2)\\cup(3,\\infty)
(-\\infty, \\infty) | (-\\infty,2)\\cup(3,\\infty)
(-\\infty, 2) \\cap (3, \\infty) | (-\\infty,2)\\cup(3,\\infty)
48 \\cup 47 | 48
48 \\cup 48 | 48
(B) = 48 | B
(B) \\approx 48 | B. 48
1,2,3,4,5,6 | 1,2,3,4,5
1,1,2,3,4 | 1,2,3,4,5
1,2,3,4,4 | 1,2,3,4,5
C. 60 | B. 60
\\sin 30 | \\sin 30^\\circ
\\sin 30^\\circ | \\sin 30
\\sin 30^\\circ | -0.98803162409286178998774890729
0.\\overline{3} | 0.3
0.3 | 0.\\overline{3}
0.(3) | 0
2.(3) | 6
\\{3,4\\} | (3,4)
\\{1,2,3\\} | (1, 2, 3)
x \\in \\{3,4\\} | (3,4)
\\phantom{3}4 | 7
|34_5| | 34
|34_5| | 34_6
A: 60 | 60
(A): 60 | 60
(A) x = 60 | 60
on | no
"""

# words without case, exponents, units, sets and intervals
RIGHT += r"""
no | No
\text{No} | no
NO | no
no | NO
YES | yes
no solution | No solution
No Solution. | no solution
or | Or
To | to
VS | vs
4 Pi | 4\pi
48 Degrees | 48^\circ
28 PERCENT | 28\%
x = 4 AND y = 7 | x=4, y=7
3 TO 5 | 3:5
Sqrt(2) | \sqrt{2}
1e-3 | 0.001
0.0000001 | 1e-07
3 \times 10^{-4} | 3.0e-4
6.02 \times 10^{23} | 6.02e+23
6.02 x 10^23 | 6.02e+23
3·10^-4 | 0.0003
3.0E+4 | 30,000
10⁻³ | 1e-3
−1.5e-2 | -0.015
.5e1 | 5
2 \cdot 10^{-3} m | 2 mm
2e-3 m | 2 mm
1.5e2 | 150
5e-05 | 0.00005
5 kg | 5
5 | 5 kg
5 kg | 5000 g
5 | 5 students
5 Students | 5
5 widgets | 5 widgets
5 s/s | 5
5 | 5 widgets
1 widget | 1 widgets
5 m/s | 5
5 | 5 \text{ m/s}
18 km/h | 5 m/s
9.8 | 9.8 \mathrm{~m/s^2}
9.8 \text{ m s}^{-2} | 9.8 m/s^2
5 N | 5 kg*m/s^2
60 min | 1 hour
1 L | 1000 mL
500 cm^3 | 0.5 L
25 | 25^\circ C
25 °C | 25 degrees Celsius
25^\circ\text{C} | 25
\$5 | 5
$5 | 5 dollars
5 | \$5
500 cents | \$5
5 years old | 5
300 K | 300
2 kJ | 2000 J
12 V | 12
5 \text{ hours} | 5
72 \text{ km per hour} | 20 m/s
\frac{\pi}{3} radians | \frac{\pi}{3}
-1, 2 | \{-1, 2\}
\{2, -1\} | -1, 2
\left\{ -1, 2 \right\} | \{-1,2\}
x = \{-1, 2\} | -1, 2
x \in \{-1, 2\} | \{2,-1\}
x = -1, 2 | \{-1, 2\}
\{5\} | 5
5 | \{5\}
x=5 | \{5\}
\{\frac{1}{2}, 3\} | 0.5, 3
x > 3 | (3, \infty)
(3, \infty) | x > 3
(3, +\infty) | 3 < x
(3, inf) | x > 3
[1, 2] | 1 \le x \le 2
1 \leqslant x \leqslant 2 | [1, 2]
2 ≥ x ≥ 1 | [1,2]
x \in [1,2] | 1 \le x \le 2
x\in(1,2) | 1 < x < 2
1 < x < 2 | x \in (1, 2)
(1, 2) | 1 < x < 2
x < 1 \text{ or } x \ge 3 | (-\infty, 1) \cup [3, \infty)
(-\infty, 1) \cup [3, \infty) | x < 1 or x \geq 3
[3, \infty) U (-\infty, 1) | x \geqslant 3 or x < 1
x < 1 \lor x > 3 | (-∞,1)∪(3,∞)
x \ne 3 | (-\infty,3)\cup(3,\infty)
(-\infty,3)\cup(3,\infty) | x \neq 3
\{x | x > 3\} | (3, \infty)
\{x \mid 1 \le x < 2\} | [1,2)
\{x \in \mathbb{R} : x > 3\} | x > 3
x > 1 and x < 3 | 1 < x < 3
x > 1 \text{ and } x \le 3 | (1, 3]
(1,3] | x > 1 and x \le 3
\mathbb{R} | (-\infty, \infty)
x \geq -\frac{1}{2} | [-0.5, \infty)
0^\circ < \theta < 90^\circ | 0 < \theta < 90
3, -3 | x = 3 or x = -3
x = -3 \text{ or } x = 3 | x = 3 or x = -3
x \le 5 cm | (-\infty, 5]
"""
WRONG += r"""
on | no
no | yes
not | no
1e-3 | 0.01
1e3 | 1e-3
2e3 | 2e-3
3 \times 10^{4} | 3e-4
48 isosceles | 48
48 triangle angle | 48
5 million | 5
5 | 5 million
5 dozen | 5
5 kg | 5 g
5 kg | 5 m
5 kg | 5 students
5 apples | 5 students
5 gadgets | 5 widgets
5 widgets | 5
5 kg | 5 widgets
5 m/s | 5 m
5 m/s | 5 m/s^2
5 km/h | 5 m/s
5 s | 5 min
5s | 5
5 N | 5 J
25^\circ F | 25^\circ C
30 kg | 30^\circ
5 cents | \$5
5 euros | \$5
60 s | 1
48 units^2 | 48 units
48 or 47 kg | 48
48 kg, 47 kg | 48
-120 | 30-60-90 triangle
4s | 4
x > 3 | [3, \infty)
x \ge 3 | (3, \infty)
y > 3 | x > 3
x < 3 | (3, \infty)
1 < x < 2 | (1, 2)
1 \le x < 2 | [1, 2]
1 < x < 2 | 1, 2
(1, 2) | 1, 2
\{1, 2\} | (1, 2)
(1, 2) | \{1, 2\}
[1, 2] | \{1, 2\}
x = 1 | \{1, 2\}
\{1, 1\} | 1
\{1,2,3\} | 1, 2
x > 3 or x < 1 | (3, \infty)
x > 3 | x > 3 or x < 1
x > 1 or x < 3 | 1 < x < 3
3 | x = 3 or x = -3
6 \text{ or } 8 | 6, 8
x \ne 3 | x = 3
(-\infty, \infty) | x > 3
2, 1 | (1, 2)
x > 1, x < 2 | (1, 2)
inf = 48 | 48
(1,2) \cup (3,4) | (1,2)
1 < y < 2 | x \in (1, 2)
1,2 | [1,2]
5 cm/s | 5 cm
9 g | 9 s
(B) no | A
"""


def pairs(table: str) -> list[tuple[str, str]]:
    return [tuple(part.strip() for part in line.rsplit("|", 1)) for line in table.splitlines() if line]


@pytest.mark.parametrize("prediction, truth", pairs(RIGHT))
def test_right(prediction, truth):
    assert geometry.grade_geometry(f"<think>a</think> \\boxed{{{prediction}}}", truth)


@pytest.mark.parametrize("prediction, truth", pairs(WRONG))
def test_wrong(prediction, truth):
    assert not geometry.grade_geometry(f"<think>a</think> \\boxed{{{prediction}}}", truth)


@pytest.mark.parametrize("truth, answerable", [("f(3)=32", True), ("2x+3y=6", True), ("2+3=5", False)])
def test_an_equation_without_letters_is_not_a_valid_truth(truth, answerable):
    assert geometry.same_answer(truth, truth, as_text=False) == answerable


EMPTY = ["None", "none", "", " ", "NaN", "°", "\\circ", "-", "?", "\\%", "\\text{ cm}", "square feet", "\\text{}"]
EMPTY += ["{}"]
BROKEN = ["5 \\sqrt {", "3 +* 4", "\\frac{1}{0}", "0^{-1}", "0:0", "12 34"]


@pytest.mark.parametrize("truth", EMPTY)
def test_no_answer_equals_an_empty_truth(truth):
    for answer in ("", " ", "{}", "\\text{}", "None", "°", truth):
        for response in (answer, f"\\boxed{{{answer}}}", "<think>a</think>", "I do not know"):
            assert not geometry.grade_geometry(response, truth)


def test_times_are_not_ratios():
    is_right = geometry.grade_geometry
    for truth, wrong in (("12:00", "1:00"), ("2:05", "2:6"), ("1:0", "5:0"), ("1:00:00", "2:00:00")):
        assert is_right(rf"\boxed{{{truth}}}", truth) and not is_right(rf"\boxed{{{wrong}}}", truth)
    assert is_right(r"\boxed{4:6}", "2:3") and is_right(r"\boxed{0:4:6}", "0:2:3")


@pytest.mark.parametrize("truth", EMPTY + BROKEN)
def test_truth_that_no_answer_can_equal_is_refused(truth):
    with pytest.raises(
        reward.UserError, match=r"^row 'row-7': the ground_truth .*correct or remove"
    ):
        check_tasks([example("48"), example(truth)])


def test_valid_truths_are_accepted():
    truths = [
        "48",
        "m",
        "B",
        "(C)",
        "isosceles, right",
        "30-60-90 triangle",
        "x < 60",
        "m\\angle A = 48",
        "2:3",
        "[2, \\infty)",
    ]
    truths += [
        "48\\%",
        "\\sqrt { x - 50 }",
        "x^2+y^2=4",
        "\\{3,-3\\}",
        "5\\sqrt{3} \\approx 8.66",
        "48 cm^2",
        "4 \\frac { 4 } { 11 }",
    ]
    assert check_tasks(map(example, truths)) == {"geo3k": len(truths)}
    for truth in ("°", " ", "."):
        row = example(truth, "shapes", answer_type="angle")
        assert grade("\\boxed{}", row)["accuracy"] == 0.0
        with pytest.raises(reward.UserError, match="does not earn full marks"):
            check_tasks([row])


def test_extract_boxed_and_unboxed_answers():
    assert reward.extract_boxed("\\boxed{1} \\boxed{\\frac{2}{3}} x") == "\\frac{2}{3}"
    assert reward.extract_boxed("\\fbox {4}") == "4"
    with Counting() as counted:
        assert reward.extract_boxed("\\boxed{47} then \\boxed{48") is None  # cut off: the earlier box does not count
        assert reward.extract_boxed("48 \\boxed48") is None
    assert counted.counts == {"no_box": 2}
    for response in ("The answer is 48", "<answer>48</answer>", "\\boxed48", "a\n48", "48 </think>"):
        assert not geometry.grade_geometry(response, "48")
    assert geometry.grade_geometry("48", "48") and not geometry.grade_geometry("47", "48")  # direct calls need no box
    assert grade("48", example("48"))["accuracy"] == 0.0  # but not in training
    for length, accuracy in ((1000, 1.0), (1001, 0.0)):  # a longer box is not a final answer
        boxed = f"\\boxed{{{'red':>{length}}}}"
        assert grade(boxed, example("red", "shapes", answer_type="colour"))["accuracy"] == accuracy


# --- values, judged by sympy --------------------------------------------------------------------------------------


@st.composite
def values(draw):
    """Draw a value: (LaTeX, the same value as a sympy expression)."""
    import sympy

    a, c, d = draw(st.integers(1, 12)), draw(st.integers(1, 9)), draw(st.integers(2, 9))
    b, sign = draw(st.sampled_from([2, 3, 4, 8, 12, 18, 27, 50, 75])), draw(st.sampled_from([1, -1]))
    minus = "-" if sign < 0 else ""
    kind = draw(st.sampled_from(["int", "decimal", "frac", "mixed", "surd", "surd_frac", "over_surd", "pi", "sum"]))
    rational, root = sympy.Rational, sympy.sqrt(b)
    latex, value = {
        "int": (f"{minus}{a}", rational(a)),
        "decimal": (f"{minus}{a}.{c}0", a + rational(c, 10)),
        "frac": (f"{minus}\\frac{{{a}}}{{{d}}}", rational(a, d)),
        "mixed": (f"{minus}{a} \\frac {{ 1 }} {{ {d} }}", a + rational(1, d)),
        "surd": (f"{minus}{a}\\sqrt{{{b}}}", a * root),
        "surd_frac": (f"{minus}\\frac{{{a}\\sqrt{{{b}}}}}{{{d}}}", a * root / d),
        "over_surd": (f"{minus}\\dfrac{{{a}}}{{{d}\\sqrt{{{b}}}}}", a / (d * root)),
        "pi": (f"{minus}\\frac{{{a}\\pi}}{{{d}}}", a * sympy.pi / d),
        "sum": (f"{minus}({a} + {c}\\sqrt{{{b}}})", a + c * root),
    }[kind]
    return latex, sign * value


@settings(max_examples=300, deadline=None, derandomize=True)
@given(values(), values())
def test_equal_exactly_when_sympy_says_so(left, right):
    import sympy

    assert geometry.same_answer(left[0], right[0]) == (sympy.simplify(left[1] - right[1]) == 0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(values())
def test_sympys_latex_of_the_same_value_is_accepted(pair):
    """The value simplified by sympy is accepted, the value plus 1/1000 is not, and its float only if it is exact."""
    import sympy

    latex, value = pair
    assert geometry.same_answer(sympy.latex(sympy.radsimp(value)), latex)
    assert not geometry.same_answer(sympy.latex(value + sympy.Rational(1, 1000)), latex)
    assert geometry.same_answer(repr(float(value)), latex) == (Fraction(repr(float(value))) == value)


WRAPPERS = ["{ %s }", "$%s$", "\\(%s\\)", "%s^\\circ", "x = %s", "%s \\text{ cm}", "\\mathbf{%s}", "%s."]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(values(), st.sampled_from(WRAPPERS))
def test_wrappers_of_an_answer_do_not_matter(pair, wrapper):
    latex = pair[0]
    assert geometry.same_answer(wrapper % latex, latex)
    assert geometry.same_answer(latex.replace("{", " { ").replace("}", " } "), latex)
    assert not geometry.same_answer(f"{wrapper % latex} or {latex}", latex)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text(alphabet="0123456789+-*/^(){}[]\\ .,:=<>≈%°√πabxm_|!?&", max_size=60), st.sampled_from(["48", "2x+3"])
)
def test_no_text_raises_or_takes_long(text, truth):
    start = time.perf_counter()
    assert geometry.grade_geometry(f"\\boxed{{{text}}}", truth) in (True, False)
    assert time.perf_counter() - start < _math_verify.TIMEOUT_S + 5


# --- hostile answers ----------------------------------------------------------------------------------------------

HOSTILE = {
    "tower": "9**9**9**9",
    "tower latex": "10^{10^{10}}",
    "tower fraction": "7**7**7**7/7",
    "long tower": "2^" * 490 + "2",
    "letter tower": "x^{999999999}",
    "factorial": "9999999!",
    "deep fractions": "\\frac{1}{" * 1000 + "x" + "}" * 1000,
    "deep roots": "\\sqrt{" * 160 + "2" + "}" * 160,
    "deep parentheses": "(" * 450 + "1" + ")" * 450,
    "wide parentheses": "（" * 450 + "1" + "）" * 450,  # become ASCII only after the first length check
    "bare roots": "√" * 900 + "2",
    "minus signs": "-" * 900 + "1",
    "sum": "1" + "+1" * 490,
    "equations": "=".join(["1"] * 490),
    "list": ",".join(["1"] * 490),
    "ratio": ":".join(["1"] * 490),
    "approximations": "≈" * 900,
    "relations": "<" * 900,
    "100 kB of digits": "9" * 100_000,
    "100 kB of spaces": " " * 100_000,
    "100 kB of open braces": "{" * 100_000,
    "100 kB of boxes": "\\boxed " * 15_000,
    "100 kB of tags": "<think>" * 15_000,
    "tag and spaces": "<" + " " * 100_000,
    "1000 spaces": "4" + " " * 990 + "8",
    "commands": "\\text{" * 150 + "a" + "}" * 150,
    "emoji": "😀" * 900,
    "other digits": "٣" * 900,
    "ligatures": "ﷺ" * 900,  # 18 characters each after normalisation
    "control": "\u202e48\x00",
    "index zero": "\\sqrt[0]{2}",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_answer_is_rejected_quickly_without_math_verify(answer):
    with Counting() as counted:
        for truth in ("5 \\sqrt { 3 }", "2x+3", "B"):
            for response in (f"<think>a</think> \\boxed{{{answer}}}", answer):
                for grader in (geometry.grade_geometry, lambda r, t: grade(r, example(t))["accuracy"]):
                    start = time.perf_counter()
                    assert not grader(response, truth)
                    assert time.perf_counter() - start < 1.0
        start = time.perf_counter()
        grade(f"\\boxed{{{answer}}}", example("red", "shapes", answer_type="colour"))
        assert time.perf_counter() - start < 1.0
    assert counted.counts["cas"] == 0


# --- math-verify in a separate process ------------------------------------------------------------------------------

HANG = "\\log_{2}{9^{9^{9^9}}}"


def test_cas_decides_what_the_parser_cannot():
    with Counting() as counted:
        assert geometry.same_answer("\\log_2 8", "3") and not geometry.same_answer("\\log_2 8", "4")
        assert geometry.same_answer("\\{3,-3\\}", "\\{-3,3\\}") and not geometry.same_answer("\\{3,-3\\}", "3")
        first = math_verify_process()
        assert geometry.same_answer("|-3|", "3") and math_verify_process() is first  # the process is kept
        assert counted.counts["graded"] == 5 and not counted.late
    with Counting() as counted:
        assert geometry.same_answer("\\log_2 4096", "12") and counted.counts == {"cas": 1, "graded": 1}
        assert geometry.same_answer("\\log_2 4096", "12") and counted.counts == {"cas": 1, "graded": 2}  # cached


def test_cas_is_killed_on_timeout_and_restarted():
    assert geometry.same_answer("\\log_2 8", "3")
    process = math_verify_process()
    with Counting() as counted:
        start = time.perf_counter()
        assert not geometry.same_answer(HANG, "5 \\sqrt { 3 }")
        assert time.perf_counter() - start < _math_verify.TIMEOUT_S + 3
        assert process.returncode == -signal.SIGKILL and counted.counts["cas_timeout"] == counted.counts["cas"] == 1
        start = time.perf_counter()
        assert not geometry.same_answer(HANG, "5 \\sqrt { 3 }")  # cached, because samples of a prompt repeat answers
        assert time.perf_counter() - start < 0.1
        assert geometry.same_answer("\\log_2 16", "4") and counted.counts["cas"] == 2


def test_a_time_limit_ends_with_its_block():
    limits = []
    with Counting(limit=lambda *args: limits.append(args)).time_limit(2.0, "question"):
        assert limits == [(2.0, "question")]
    assert limits[1:] == [(0.0, None)]


def test_cas_crash_is_counted_and_the_process_replaced():
    assert geometry.same_answer("\\log_2 8", "3")
    process = math_verify_process()
    process.kill()  # while it is idle
    process.wait()
    with Counting() as counted:
        assert geometry.same_answer("\\log_2 16", "4") and counted.counts["cas_crash"] == 0  # it was replaced
        threading.Timer(0.5, os.kill, (math_verify_process().pid, signal.SIGKILL)).start()
        assert not geometry.same_answer(HANG, "7") and counted.counts["cas_crash"] == 1
        assert geometry.same_answer("\\log_2 32", "5")


def test_an_exception_in_sympy_is_a_wrong_answer(monkeypatch):
    def raises(*_):
        raise MemoryError

    monkeypatch.setattr(_math_verify, "compare_latex", raises)
    with Counting(limit=lambda seconds, question: None) as counted:  # as in a reward worker
        assert not geometry.same_answer("\\log_2 8", "3")
    assert counted.counts == {"cas_crash": 1, "graded": 1}


def test_hanging_answers_of_a_batch_share_a_budget(monkeypatch):
    """After MAX_LATE_COMPARISONS timeouts the rest of a batch is not compared. The next batch is compared again."""
    monkeypatch.setattr(_math_verify, "MAX_LATE_COMPARISONS", 1)
    answers = ["\\log_2 8"] + [f"\\log_{{2}}{{9^{{9^{{9^{n}}}}}}}" for n in range(9, 49)] + ["4"]
    responses, rows = [f"\\boxed{{{a}}}" for a in answers], [example("4" if a == "4" else "3") for a in answers]
    grader = Grader(RewardConfig(reward_workers=0, reward_errors="stop"))
    assert geometry.same_answer("\\log_2 4", "2")  # imports math-verify, whose time would count against the answers
    for _ in range(2):
        start = time.perf_counter()
        rewards = grader.collect([make_rollout_stub(row, text) for row, text in zip(rows, responses, strict=True)])
        assert time.perf_counter() - start < _math_verify.TIMEOUT_S + 5.0
        assert [r["accuracy"] for r in rewards] == [1.0] + [0.0] * 40 + [1.0]
        counts = grader.pop_counts()
        assert counts["graded"] == len(answers) and counts["cas_timeout"] == 1 and counts["cas_budget"] == 39


def test_an_evaluation_is_graded_in_chunks(monkeypatch):
    import eval as evaluation
    from rollout import Prompt, SamplingParams
    from utils import DistContext

    contexts, rows = [], [example(str(n)) for n in range(5)]
    for n, row in enumerate(rows):
        row.uid = str(n)
        row.images = row.videos = []
    rows[4].data_source, rows[4].ground_truth = "none", "9"  # its reward fails
    monkeypatch.setattr(reward, "TASKS", dict(reward.TASKS))

    @reward.register("none")
    def none(response, example):
        return {}

    class Engine:
        def generate(self, prompts, samples, sampling, on_rollout=None):
            contexts.append(prompts[0].context)
            answers = [(p, f"\\boxed{{{int(p.example.ground_truth) + s}}}") for p in prompts for s in range(samples)]
            fields = {"finish_reason": "stop", "ended_by": "response", "is_episode": False}
            fields |= {"response": [1, 2], "response_mask": [True, True]}
            return [RolloutStub(text=text, prompt=prompt, **fields) for prompt, text in answers]

    grader = Grader(RewardConfig(reward_workers=0))
    monkeypatch.setattr(evaluation, "CHUNK_EXAMPLES", 3)

    def make_prompts(examples, processor, blank, reset_fn, context):
        return [Prompt(e.uid, [], [], e, [], context=context) for e in examples]

    monkeypatch.setattr(evaluation, "make_prompts", make_prompts)
    monkeypatch.setattr(DistContext, "gather_to_main", lambda ctx, records: records)
    ctx = DistContext(0, 1, "cpu")
    args = (Engine(), rows, None, grader, ctx, SamplingParams(8, 1.0, 1.0, 0))
    records = evaluation.Evaluation(*args, samples=2, step=3).collect_records()
    assert [(c.step, c.stage) for c in contexts] == [(3, reward.CurriculumStage())] * 2 and not grader.counts
    assert [(r["index"], r["uid"], r["ground_truth"]) for r in records[:4]] == [(n, str(n), str(n)) for n in range(4)]
    for n, record in enumerate(records[:4]):
        assert [s["text"] for s in record["samples"]] == [f"\\boxed{{{n}}}", f"\\boxed{{{n + 1}}}"]
        assert [s["rewards"]["accuracy"] for s in record["samples"]] == [1.0, 0.0]
    assert [(s["finish_reason"], s["rewards"]) for s in records[4]["samples"]] == [("error", {"reward": 0.0})] * 2
    summary = evaluation.summarise(records)
    assert summary["failed"] == 2 and summary["accuracy"] == 0.4


def test_cas_answers_several_threads():
    verdicts = {}

    def ask(n: int) -> None:
        verdicts[n] = geometry.same_answer(f"\\log_2 {2**n}", str(n if n % 2 else n + 1))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {n: bool(n % 2) for n in range(1, 9)}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("ending", ["exit", "killed while the worker hangs"])
def test_no_worker_outlives_its_process(ending):
    code = "import os, sys, signal, threading, time\nfrom tasks import geometry, _math_verify\n"
    code += "assert geometry.same_answer('\\\\log_2 8', '3')\n"
    code += "print(_math_verify.own_pool(os.getpid()).processes[0].popen.pid, flush=True)\n"
    if ending != "exit":
        code += "threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        code += f"geometry.same_answer({HANG!r}, '3'); raise AssertionError('not killed')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == (0 if ending == "exit" else -signal.SIGKILL), done.stderr
    deadline = time.monotonic() + 8
    while is_alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(done.stdout))


def test_a_forked_process_gets_its_own_worker():
    code = """
import os
from reward import Counting
from tasks import geometry
from tasks._math_verify import own_pool
def worker():
    return own_pool(os.getpid()).processes[0].popen.pid
with Counting() as counted:
    assert geometry.same_answer("\\\\log_2 8", "3")
    first = worker()
    if (pid := os.fork()) == 0:
        good = geometry.same_answer("\\\\log_2 16", "4") and worker() != first
        own_pool(os.getpid()).close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert geometry.same_answer("\\\\log_2 32", "5") and worker() == first
assert counted.counts["cas_crash"] == 0
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def print_heavy_imports(names, heavy):
    code = f"import sys, {names}; print([m for m in {heavy!r} if m in sys.modules]"
    code += ", sys.modules['tasks._math_verify'].own_pool.cache_info().currsize)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30).stdout


def test_imports_are_light():
    """Reward workers import the first two modules; a task's file also imports prepare_data.py, for its data recipe."""
    assert print_heavy_imports("reward, tasks._math_verify", ("torch", "numpy", "sympy", "math_verify")) == "[] 0\n"
    assert print_heavy_imports("tasks.geometry", ("torch", "transformers", "sympy", "math_verify")) == "[] 0\n"


# --- format -------------------------------------------------------------------------------------------------------

PIECES = ["<think>", "</think>", "\\boxed{", "}", "x", "\n", "\\boxed", "{"]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_format_reward_equals_verls_regex(pieces):
    response = "<think>" * (len(pieces) % 2) + "".join(pieces)
    expected = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", response, re.DOTALL) is not None
    assert geometry.format_reward(response) == float(expected)


def test_special_tokens_are_not_accepted_as_text():
    assert geometry.format_reward("<think>a<|im_start|></think>\\boxed{4}") == 0.0
    assert grade("<think>a</think>\\boxed{4<|im_start|>}", example("4")) == {
        "accuracy": 0.0,
        "format": 0.0,
        "reward": 0.0,
    }
    row = example("red", "shapes", answer_type="colour")
    assert grade("\\boxed{red<|endoftext|>}", row)["reward"] == 0.0
    assert grade("<think><|im_end|></think>\\boxed{red}", row)["format"] == 0.0


def test_engines_keep_special_tokens_visible(loaded):
    from rollout import response_text

    _, processor = loaded["qwen2_5_vl"]
    tokenizer, end = processor.tokenizer, processor.eos_ids[0]
    four, start = tokenizer.encode("4", add_special_tokens=False), tokenizer.convert_tokens_to_ids("<|im_start|>")
    responses = [[*four, start, end], [*four, end], [*four, end, *four], four, []]
    name = tokenizer.decode([end])
    assert [response_text(processor, tokens) for tokens in responses] == ["4<|im_start|>", "4", f"4{name}4", "4", ""]


def test_format_reward_takes_linear_time():
    start = time.perf_counter()
    assert geometry.format_reward("<think>" + "</think>\\boxed{" * 100_000) == 0.0
    assert time.perf_counter() - start < 0.5


# --- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response, truth, accuracy, form",
    [
        ("\\boxed{red}", "red", 1, 1),
        (" <think>I see</think>\n\\boxed{ Red. }\n", "red", 1, 1),
        ("\\boxed{45^\\circ}", "45", 1, 1),
        ("\\boxed{45°}", "45", 1, 1),
        ("\\boxed{45 degrees}", "45", 1, 1),
        ("\\boxed{\\text{light blue}}", "light  blue", 1, 1),
        ("\\boxed{\\textbf{Red}}", "red", 1, 1),
        ("\\boxed{\\mathrm{red}}", "red", 1, 1),
        ("\\boxed{\\textbf{blue}}", "red", 0, 1),
        ("\\boxed{blue}", "red", 0, 1),
        ("\\boxed{red or blue}", "red", 0, 1),
        ("It is \\boxed{red}", "red", 1, 0),
        ("\\boxed{red} indeed", "red", 1, 0),
        ("\\boxed{blue}\\boxed{red}", "red", 1, 0),
        ("<think>\\boxed{red}</think>\\boxed{red}", "red", 1, 0),
        ("<think>\\boxed{red}</think>", "red", 1, 0),
        ("<think>I see \\boxed{red}", "red", 1, 0),
        ("red", "red", 0, 0),
        ("\\boxed{red", "red", 0, 0),
    ],
)
def test_shapes(response, truth, accuracy, form):
    rewards = grade(response, example(truth, "shapes", answer_type="colour"))
    assert rewards == {"accuracy": accuracy, "format": form, "reward": pytest.approx(0.9 * accuracy + 0.1 * form)}


def test_shapes_needs_a_known_answer_type():
    for extra in ({}, {"answer_type": "size"}):
        with pytest.raises(ValueError, match="row-7.*answer_type.*count, colour, shape, exists, angle"):
            grade("\\boxed{red}", example("red", "shapes", **extra))


# --- tasks and custom rewards -------------------------------------------------------------------------------------


def test_task_names():
    for name in ("hiyouga/geometry3k", "Geometry3K", "geo3k", " someone/GEO3K "):
        assert reward.task_name(name) == "geo3k"
    assert reward.task_name("owner/Shapes") == "shapes"


def test_unknown_task_error_names_tasks_and_fix():
    with pytest.raises(ValueError, match=r"'me/chess'.*geo3k, .*shapes.*--reward FILE.py:FUNCTION"):
        grade("x", example("e4", "me/chess"))


CHESS = """
from reward import register

INSTRUCTION = "Write a move."

@register("chess", "lichess", answerable=lambda truth, rewards: truth != "")
def chess(response, example, finish_reason):
    return {"legal": 1, "reward": float(response == example.ground_truth)}
"""


def test_a_file_in_tasks_is_a_task(tmp_path):
    for name in ("reward.py", "errors.py", "settings.py", "prepare_data.py", "startup.py", "requirements.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for name in ("tasks", "sources", "rewards"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tasks" / "chess.py").write_text(CHESS)
    code = """
from types import SimpleNamespace
import reward
from rewards.grade import Grader, check_tasks, make_rollout_stub
sources = [("me/LiChess", "e4"), ("go", ""), ("chess", "")]
rows = [SimpleNamespace(data_source=source, ground_truth=truth, extra={}, uid=truth, messages=[])
        for source, truth in sources]
grader = Grader(reward.RewardConfig(reward_workers=0))
scored = grader.collect([make_rollout_stub(rows[0], text) for text in ("e4", "d4")])
print(scored, check_tasks(rows[:1]), reward.TASKS["lichess"].instruction)
for row in rows[1:]:
    try:
        check_tasks([row])
    except reward.UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    scored, unknown, empty = done.stdout.splitlines()
    assert scored == "[{'legal': 1.0, 'reward': 1.0}, {'legal': 1.0, 'reward': 0.0}] {'chess': 1} Write a move."
    assert re.search(r"no reward for data_source 'go' \(task 'go'\); known tasks: .*chess, .*geo3k, .*shapes", unknown)
    assert empty.startswith("row '': the ground_truth '', given as the answer, does not earn full marks ")


@pytest.mark.parametrize("missing, allowed", [("tasks.geometry", True), ("a_package", False)])
def test_a_deleted_task_may_be_missing_but_a_package_may_not(missing, allowed, monkeypatch):
    def fail(name):
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(reward.importlib, "import_module", fail)
    with nullcontext() if allowed else pytest.raises(ModuleNotFoundError):
        reward.load_tasks.__wrapped__()


def test_register_refuses_a_taken_name(monkeypatch):
    reward.load_tasks()
    monkeypatch.setattr(reward, "TASKS", dict(reward.TASKS))
    reward.register("chess")(lambda response, example, finish_reason: {"reward": float(finish_reason == "length")})
    assert grade("x", example("e4", "me/chess"), finish_reason="length") == {"reward": 1.0}
    with pytest.raises(ValueError, match="'geo3k'"):
        reward.register("geo3k")(lambda response, example, finish_reason: {})


def test_check_tasks(monkeypatch):
    rows = [example("48"), example("48", "hiyouga/geometry3k"), example("red", "shapes", answer_type="colour")]
    with Counting() as counted:
        assert check_tasks(rows) == {"geo3k": 2, "shapes": 1}
    assert not counted.counts
    with pytest.raises(ValueError, match="chess"):
        check_tasks([*rows, example("e4", "chess")])
    with pytest.raises(ValueError, match="answer_type"):
        check_tasks([*rows, example("red", "shapes")])
    with pytest.raises(ValueError, match="ground_truth is 48 .int"):
        check_tasks([*rows, example(48)])
    assert check_tasks([example("e4", "chess")], lambda example: True) == {"chess": 1}
    monkeypatch.setattr(reward.importlib.util, "find_spec", lambda name: None)
    geometry.require_math_verify.cache_clear()
    with pytest.raises(ValueError, match="math-verify"):
        check_tasks(rows)


def test_reward_parts_are_bounded():
    import numpy
    import torch

    def validate(value):
        return reward.validate_reward({"part": value, "reward": 0}, "row-7", "a" * 99)["part"]

    good = [
        True,
        3,
        Fraction(1, 2),
        Decimal("0.5"),
        -1e6,
        numpy.float32(0.5),
        numpy.int64(2),
        numpy.bool_(True),
        torch.tensor(0.5),
    ]
    for value in good:
        assert validate(value) == float(value) and type(validate(value)) is float
    huge = [
        10**400,
        -(10**5000),
        1e308,
        -1e308,
        1e6 + 1,
        float("inf"),
        Fraction(10**400),
        Decimal("1e999"),
        numpy.float64(1e300),
    ]
    invalid = [
        float("nan"),
        Decimal("NaN"),
        Decimal("sNaN"),
        numpy.float32("nan"),
        torch.tensor(float("inf")),
        torch.zeros(2),
        1j,
        None,
    ]
    for value in [*huge, *invalid, "1" * 9999]:
        with pytest.raises(
            reward.UserError, match=r"row 'row-7': reward part 'part' is .* for the response 'a{80}'; ret"
        ) as caught:
            validate(value)
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", ["mean", "zero_std_frac", "unpenalised", "overlong"])
def test_names_of_metrics_are_reserved(name):
    with pytest.raises(reward.UserError, match=f"row 'row-7': reward part '{name}' has the name of a metric"):
        reward.validate_reward({name: 0.5, "reward": 1.0}, "row-7", "abc")


def test_score_batch_keeps_order():
    responses = [f"<think>a</think>\\boxed{{{i}}}" for i in range(6)]
    rewards = score_batch(responses, [example(str(i if i != 3 else 9)) for i in range(6)])
    assert [r["accuracy"] for r in rewards] == [1, 1, 1, 0, 1, 1]
    assert rewards[0] == {"accuracy": 1.0, "format": 1.0, "reward": 1.0} and rewards[3]["reward"] == pytest.approx(0.1)
