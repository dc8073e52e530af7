#include "launch/job/failure_judgement.h"

#include <gtest/gtest.h>

#include <csignal>
#include <deque>
#include <string>
#include <vector>

#include "launch/job/rank_lines.h"

namespace sirtaki::launch {
namespace {

TEST(FailureJudgementTest, AGoodEndIsNoFailure) {
  EXPECT_FALSE(JudgeEnd(1, "b", {EndKind::kExited, 0, ""}, {}).has_value());
}

TEST(FailureJudgementTest, NamesRankHostAndCause) {
  const auto exited = JudgeEnd(1, "b", {EndKind::kExited, 3, ""}, {"x", "y"});
  EXPECT_EQ(exited->code, 3);
  EXPECT_EQ(FailureText(*exited),
            "sirtakirun: rank 1 on host b ended with exit code 3\n"
            "sirtakirun: its last lines on standard error:\n"
            "sirtakirun:   x\n"
            "sirtakirun:   y\n");
  const auto crashed = JudgeEnd(0, "a", {EndKind::kSignalled, SIGSEGV, ""}, {});
  EXPECT_EQ(crashed->code, 139);
  EXPECT_EQ(FailureText(*crashed), "sirtakirun: rank 0 on host a died of SIGSEGV\n");
  const auto missing = JudgeEnd(0, "a", {EndKind::kNotStarted, 2, "\"x\" cannot be started"}, {});
  EXPECT_EQ(missing->code, 127);
  EXPECT_EQ(FailureText(*missing), "sirtakirun: rank 0 on host a: \"x\" cannot be started\n");
  const Failure lost = JudgeLoss(7, "c", "Connection timed out", /*gone=*/true, {});
  EXPECT_EQ(lost.code, 1);
  EXPECT_EQ(FailureText(lost), "sirtakirun: rank 7 on host c was lost: Connection timed out\n");
  EXPECT_EQ(FailureText({1, "", {}}), "");  // a launcher has said it itself
}

TEST(FailureJudgementTest, SaysOnceWhatTheProgramThrew) {
  const EndMessage aborted{EndKind::kSignalled, SIGABRT, ""};
  const auto text = [&](const std::deque<std::string>& lines) {
    return FailureText(*JudgeEnd(1, "b", aborted, lines));
  };
  const std::string begin = "terminate called after throwing an instance of 'std::runtime_error'";
  EXPECT_EQ(text({begin, "  what():  no such sample"}),
            "sirtakirun: rank 1 on host b threw std::runtime_error: no such sample\n");
  EXPECT_EQ(JudgeEnd(1, "b", aborted, {begin})->code, 134);
  // A progress bar stands before it, and the text has a second line.
  EXPECT_EQ(text({"epoch 3", "50%" + begin, "  what():  no such sample", "see the manual"}),
            "sirtakirun: rank 1 on host b threw std::runtime_error: no such sample\n"
            "sirtakirun: its last lines on standard error:\n"
            "sirtakirun:   epoch 3\n"
            "sirtakirun:   see the manual\n");
  EXPECT_EQ(text({"terminate called after throwing an instance of 'int'"}),
            "sirtakirun: rank 1 on host b threw int\n");
  EXPECT_EQ(text({"u: u.cc:3: main: Assertion `false' failed."}),
            "sirtakirun: rank 1 on host b died of SIGABRT\n"
            "sirtakirun: its last lines on standard error:\n"
            "sirtakirun:   u: u.cc:3: main: Assertion `false' failed.\n");
  // That was a process which the rank had started.
  EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kSignalled, SIGSEGV, ""}, {begin})->text,
            "rank 1 on host b died of SIGSEGV");
}

TEST(FailureJudgementTest, SaysOnceWhatAPythonProgramRaised) {
  const auto text = [](const std::deque<std::string>& lines) {
    return FailureText(*JudgeEnd(1, "b", {EndKind::kExited, 1, ""}, lines));
  };
  const std::string head = "Traceback (most recent call last):";
  const std::string file = "  File \"train.py\", line 6, in <module>";
  const std::string frame = "    read(12)";
  const std::string frames =
      "sirtakirun: its last lines on standard error:\nsirtakirun:   " + head +
      "\nsirtakirun:   " + file + "\nsirtakirun:   " + frame + "\n";
  EXPECT_EQ(text({head, file, frame, "ValueError: no such sample"}),
            "sirtakirun: rank 1 on host b raised ValueError: no such sample\n" + frames);
  EXPECT_EQ(text({head, file, frame, "data.Missing", "[warning] a record was written"}),
            "sirtakirun: rank 1 on host b raised data.Missing\n" + frames +
                "sirtakirun:   [warning] a record was written\n");
  // The last one is what nobody caught; of a long one the head is not among the last lines.
  EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 1, ""},
                     {frame, file, frame, "KeyError: 'a'", "",
                      "During handling of the above exception, another exception occurred:", "",
                      head, file, frame, "ValueError: no such sample"})
                ->text,
            "rank 1 on host b raised ValueError: no such sample");
  EXPECT_EQ(
      JudgeEnd(1, "b", {EndKind::kExited, 1, ""}, {frame, file, frame, "KeyError: 'a'"})->text,
      "rank 1 on host b raised KeyError: 'a'");
  // These did not end the program.
  for (const auto& lines : std::vector<std::deque<std::string>>{
           {"Exception in thread Thread-1 (load):", head, file, frame, "ValueError: x"},
           {"Exception ignored in: <function f>", head, file, frame, "ValueError: x"},
           {"  indented", "ValueError: x"},
           {"usage:", file, "train: no such file"},
           {"ValueError: x"}}) {
    EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 1, ""}, lines)->text,
              "rank 1 on host b ended with exit code 1");
  }
  // The line before the head may have been pushed out, and have said that it was a thread's.
  std::deque<std::string> full = {head, file, frame, "ValueError: x"};
  full.resize(kKeptLines, "more");
  EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 1, ""}, full)->text,
            "rank 1 on host b ended with exit code 1");
  full.pop_back();
  EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 1, ""}, full)->text,
            "rank 1 on host b raised ValueError: x");
  EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 3, ""}, {head, file, frame, "ValueError: x"})->text,
            "rank 1 on host b ended with exit code 3");
  // Whose fault it was is judged by the whole.
  EXPECT_TRUE(JudgeEnd(1, "b", {EndKind::kExited, 1, ""},
                       {head, file, frame,
                        "sirtaki.torch.PeerLostError: peer lost: rank 0 is lost (from rank 1)"})
                  ->follows);
}

TEST(FailureJudgementTest, SaysWhereToLookForLibrariesThatDoNotFit) {
  for (const std::string line :
       {"./train: error while loading shared libraries: libtorch_cpu.so: cannot open shared object",
        "./train: symbol lookup error: libsirtaki.so.0.1: undefined symbol: _ZN2at"}) {
    EXPECT_NE(JudgeEnd(1, "b", {EndKind::kExited, 127, ""}, {line})->text.find("--check-build"),
              std::string::npos);
    EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 1, ""}, {line})->text,
              "rank 1 on host b ended with exit code 1");
  }
  EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 127, ""}, {"sh: 1: x: not found"})->text,
            "rank 1 on host b ended with exit code 127");
}

TEST(FailureJudgementTest, SaysHowAProgramOfHorovodsRuns) {
  EXPECT_EQ(JudgeEnd(1, "b", {EndKind::kExited, 1, ""},
                     {"Traceback (most recent call last):", R"(  File "train.py", line 1)",
                      "ModuleNotFoundError: No module named 'horovod'"})
                ->text,
            "rank 1 on host b raised ModuleNotFoundError: No module named 'horovod': sirtakirun "
            "--as-horovod runs such a program on Sirtaki");
}

TEST(FailureJudgementTest, SaysWhatASignalOftenMeans) {
  EXPECT_NE(JudgeEnd(0, "a", {EndKind::kSignalled, SIGBUS, ""}, {})->text.find("/dev/shm"),
            std::string::npos);
  EXPECT_NE(JudgeEnd(0, "a", {EndKind::kSignalled, SIGKILL, ""}, {})->text.find("memory"),
            std::string::npos);
}

TEST(FailureJudgementTest, AnEndBySignalOfTheLauncherFollowsFromAnother) {
  EXPECT_TRUE(JudgeEnd(0, "a", {EndKind::kSignalled, SIGTERM, "", true}, {})->follows);
  EXPECT_FALSE(JudgeEnd(0, "a", {EndKind::kSignalled, SIGTERM, "", false}, {})->follows);
  EXPECT_FALSE(JudgeEnd(0, "a", {EndKind::kExited, 3, "", true}, {})->follows);
}

TEST(FailureJudgementTest, AnEndForWantOfAnotherRankFollowsFromThatRanks) {
  const auto follows = [](int rank, const std::string& line) {
    return JudgeEnd(rank, "a", {EndKind::kExited, 1, ""}, {"epoch 3", line})->follows;
  };
  const std::string lost = "train: rank 0: peer lost: rank 12 is lost: it has not … (from rank 0)";
  EXPECT_TRUE(follows(0, lost));
  EXPECT_TRUE(follows(1, lost));
  EXPECT_TRUE(follows(0, "shut down: \"w\": rank 3 has shut down: the program exited"));
  const std::string aborted = "aborted: loss is not a number (from rank 3 on host b)";
  EXPECT_TRUE(follows(0, aborted));
  EXPECT_FALSE(follows(3, aborted));
  EXPECT_FALSE(follows(0, "rank 3 is slow"));
  EXPECT_FALSE(follows(0, ""));
  EXPECT_TRUE(JudgeEnd(0, "a", {EndKind::kSignalled, SIGABRT, ""}, {"what():  " + lost})->follows);
  EXPECT_TRUE(JudgeEnd(0, "a", {EndKind::kSignalled, SIGPIPE, ""}, {})->follows);
}

TEST(FailureJudgementTest, AFaultComesBeforeWhatFollowsFromIt) {
  const std::string fault =
      "timed out: \"slow\" has waited 6 s for rank 0 (from rank 1 on host vm)";
  Failure ended = *JudgeEnd(0, "vm", {EndKind::kSignalled, SIGTERM, "", true}, {"wrote a record"});
  ASSERT_TRUE(IsCause(fault, ended));
  ended.fault = fault;
  EXPECT_EQ(FailureText(ended), "sirtakirun: first fault: " + fault +
                                    "\nsirtakirun: rank 0 on host vm died of SIGTERM\n");
  Failure exited = *JudgeEnd(0, "vm", {EndKind::kExited, 3, ""}, {"the reason"});
  ASSERT_TRUE(IsCause(fault, exited));
  exited.fault = fault;
  EXPECT_EQ(FailureText(exited), "sirtakirun: first fault: " + fault +
                                     "\nsirtakirun: rank 0 on host vm ended with exit code 3\n"
                                     "sirtakirun: its last lines on standard error:\n"
                                     "sirtakirun:   the reason\n");
}

TEST(FailureJudgementTest, ARanksOwnEndIsTheCauseOfTheFaultThatIsAboutIt) {
  const Failure killed = *JudgeEnd(1, "b", {EndKind::kSignalled, SIGKILL, ""}, {});
  EXPECT_FALSE(IsCause("peer lost: rank 1 is lost: its process has ended (from rank 0)", killed));
  const Failure exited = *JudgeEnd(1, "b", {EndKind::kExited, 3, ""}, {});
  EXPECT_FALSE(IsCause("aborted: the program exited with code 3 (from rank 1 on host b)", exited));
  EXPECT_FALSE(IsCause("", exited));
  // Nobody knows of that end yet.
  const Failure told = *JudgeEnd(0, "a", {EndKind::kSignalled, SIGTERM, "", true}, {});
  EXPECT_TRUE(IsCause("peer lost: rank 1 is lost: its process has ended (from rank 0)", told));
}

TEST(FailureJudgementTest, WhichLostRanksAreGoneByThemselves) {
  struct Case {
    bool silent, stops, failed, told, gone;
  };
  for (const Case& c : {
           Case{false, false, false, false, true},  // the first to fail
           Case{false, false, true, false, false},  // MPICH and Slurm may have killed it
           Case{false, false, true, true, true},    // Open MPI would have told it
           Case{false, true, true, true, false},    // and then has killed it
           Case{true, true, true, true, true},      // its host answers no more
           Case{true, false, true, false, true},
       }) {
    EXPECT_EQ(IsGone(c.silent, c.stops, c.failed, c.told), c.gone) << c.silent << c.stops << c.told;
  }
}

TEST(FailureJudgementTest, ALostRankIsTheCauseOfWhatFollows) {
  const Failure told = *JudgeEnd(0, "a", {EndKind::kSignalled, SIGTERM, "", true}, {});
  const Failure exited = *JudgeEnd(1, "b", {EndKind::kExited, 3, ""}, {});
  const Failure gone = JudgeLoss(2, "c", "", /*gone=*/true, {});
  const Failure killed = JudgeLoss(2, "c", "", /*gone=*/false, {});
  EXPECT_TRUE(IsCauseOf(gone, told, false));
  EXPECT_TRUE(IsCauseOf(gone, told, true));
  EXPECT_TRUE(IsCauseOf(exited, told, false));
  EXPECT_FALSE(IsCauseOf(exited, told, true));
  EXPECT_FALSE(IsCauseOf(killed, told, false));
  EXPECT_FALSE(IsCauseOf(gone, exited, false));
}

TEST(FailureJudgementTest, SignalsHaveNames) {
  EXPECT_EQ(SignalName(SIGKILL), "SIGKILL");
  EXPECT_EQ(SignalName(99), "signal 99");
}

TEST(VerdictTest, ARankThatLeavesEarlyIsNamedWhereNothingElseTells) {
  const Failure ended = *JudgeEnd(0, "a", {EndKind::kSignalled, SIGTERM, "", true}, {});
  Verdict verdict;
  verdict.NoteGoodEnd(1, "b", /*stopped=*/false);
  verdict.NoteGoodEnd(2, "b", /*stopped=*/false);
  verdict.Take(ended, /*stopped=*/false);
  verdict.Conclude();
  EXPECT_EQ(
      FailureText(*verdict.failure),
      "sirtakirun: rank 1 on host b ended with exit code 0 while others ran, and then rank 0 on "
      "host a died of SIGTERM\n");
  EXPECT_EQ(verdict.failure->code, 128 + SIGTERM);

  Verdict of_stopped;  // that end says nothing
  of_stopped.Take(ended, false);
  of_stopped.NoteGoodEnd(1, "b", /*stopped=*/true);
  of_stopped.Conclude();
  EXPECT_EQ(FailureText(*of_stopped.failure), "sirtakirun: rank 0 on host a died of SIGTERM\n");

  Verdict of_fault;
  of_fault.NoteGoodEnd(1, "b", false);
  of_fault.TakeFault(0, "timed out: \"w\" (from rank 0 on host a)");
  of_fault.Take(ended, false);
  of_fault.Conclude();
  EXPECT_EQ(of_fault.failure->text, ended.text);

  Verdict by_itself;
  by_itself.NoteGoodEnd(1, "b", false);
  by_itself.Take(*JudgeEnd(0, "a", {EndKind::kExited, 3, ""}, {}), false);
  by_itself.Conclude();
  EXPECT_EQ(by_itself.failure->text, "rank 0 on host a ended with exit code 3");
}

// sys.exit(0) on rank 1; rank 0 ends for that, and says so to its group.
TEST(VerdictTest, TheEndOfTheJudgedRankIsNotItsCause) {
  const Failure raised =
      *JudgeEnd(0, "a", {EndKind::kExited, 1, ""}, {"E: \"w\": rank 1 has shut down: the end"});
  ASSERT_TRUE(raised.follows);
  EXPECT_FALSE(IsCause("aborted: the program exited with code 1 (from rank 0 on host a)", raised));
  EXPECT_FALSE(IsCause("aborted: the program exited with code 1 (from rank 0)", raised));
  EXPECT_TRUE(IsCause("aborted: the program exited with code 1 (from rank 1 on host a)", raised));
  EXPECT_TRUE(IsCause("aborted: the program exited with code 1 (from rank 10)", raised));
}

TEST(VerdictTest, AFaultThatTheFailureSaysIsNotSaidAgain) {
  Failure threw = *JudgeEnd(0, "a", {EndKind::kExited, 3, ""}, {});
  threw.fault = "timed out: w";
  threw.text = "rank 0 on host a threw Error: timed out: w";
  EXPECT_EQ(FailureText(threw), "sirtakirun: rank 0 on host a threw Error: timed out: w\n");
}

}  // namespace
}  // namespace sirtaki::launch
