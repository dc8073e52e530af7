# Turns the recipes of a Markdown file into tests: each block of code after `<!-- recipe: NAME -->` is
# the body of one. `file`: the Markdown file's name, for messages of the compiler.
BEGIN {
  print "// RANKS: 1 2"
  print "// Generated from " file "."
  print "#include <gtest/gtest.h>"
  print "#include \"tests/docs/recipe_setup.h\""
  print "namespace recipes {"
  print "namespace {"
}
/^<!-- recipe: / { name = $3; next }
/^```cpp$/ && name != "" {
  print "void Recipe_" name "(std::shared_ptr<Net>& model, std::vector<Batch>& loader, const std::string& folder) {"
  print "  (void)model, (void)loader, (void)folder;"
  print "#line " NR + 1 " \"" file "\""
  inside = 1
  next
}
/^```$/ && inside {
  print "}"
  # Parameters have moved, in the same way on every rank.
  print "TEST(RecipesTest, " name ") {"
  print "  sirtaki::init();"
  print "  Setup setup;"
  print "  Recipe_" name "(setup.model, setup.loader, setup.folder);"
  print "  sirtaki::check_parameters(*setup.model);"
  print "}"
  inside = 0
  name = ""
  ++count
  next
}
/^```cpp$/ { bare = 1; print "#error " file ": a block of code without a recipe in front of it" }
inside { print }
END {
  print "}  // namespace"
  print "}  // namespace recipes"
  if (count == 0 || inside) print "#error " file ": no recipes, or one without an end"
}
